"""Errors survive pickling between processes, and limits of the system are no defects."""

from __future__ import annotations

import copy
import errno
import pickle
import signal
import threading
from collections.abc import Callable

import pytest

from quantspec_cli.errors import KINDS, QuantspecError, internal, interrupted, of_kind, one_line, reason, refused


def test_a_limit_of_the_system_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    monkeypatch.setattr("threading._start_new_thread", refuse)
    monkeypatch.setattr("threading._start_joinable_thread", refuse, raising=False)
    with pytest.raises(RuntimeError) as caught:
        threading.Thread(target=print).start()
    assert (internal(caught.value).kind, "ulimit" in internal(caught.value).hint) == ("does_not_fit", True)
    assert internal(MemoryError()).message == "out of memory"
    assert internal(RuntimeError("other")).kind == "internal"


def test_reasons_of_a_system_begin_small_and_keep_names() -> None:
    assert reason(OSError(28, "No space left on device", "/a")) == "no space left on device"
    assert reason(OSError("Is a directory (os error 21)")) == "is a directory"
    assert reason(ConnectionError("Set the variable RAY_ADDRESS.")) == "set the variable RAY_ADDRESS."


def test_open_files_are_not_blamed_on_the_disk() -> None:
    assert "ulimit -n" in refused(OSError(errno.EMFILE, "Too many open files")).hint
    assert "disk" in refused(OSError(errno.ENOSPC, "No space left on device")).hint


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


def test_foreign_text_keeps_its_words_and_no_control_character() -> None:
    family, persian = "\U0001f468\u200d\U0001f467", "\u0645\u06cc\u200c\u0634\u0648\u062f"
    assert one_line(f"{family} {persian}\n\x1b[31m\u202e") == f"{family} {persian} \ufffd[31m\ufffd"
