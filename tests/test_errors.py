"""Errors survive pickling between processes."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable

import pytest

from quantspec_cli.errors import KINDS, QuantspecError, interrupted, of_kind


@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "error",
    [*(of_kind(kind, "gamma is 17", "use 0 to 16") for kind in KINDS), interrupted(signal.SIGTERM)],
    ids=[*KINDS, "signal"],
)
def test_an_error_survives_a_pickle(error: QuantspecError, again: Callable[[QuantspecError], QuantspecError]) -> None:
    error.kept = {"results": [{"text": "so far"}]}
    found = again(error)
    assert found is not error
    assert type(found) is type(error)
    assert (str(found), found.exit_code, found.to_json()) == (str(error), error.exit_code, error.to_json())
    assert "so far" in str(found.to_json())
