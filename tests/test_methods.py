"""One list of methods: what Python repeats is what the engine has, and prompt lookup is a method like any other."""

from __future__ import annotations

from typing import Any

import pytest

from quantspec_cli import Engine, _native
from quantspec_cli.options import METHODS, EngineOptions, Method

# It repeats itself, so that there is something to look up; greedy decoding of the demo model does so anyway.
TEXT = "The committee met in the morning. The committee met in the evening. The committee"


def test_the_list_is_the_engines() -> None:
    engines = {method.pop("name"): Method(**method) for method in _native.methods()}
    assert list(engines.items()) == list(METHODS.items())


@pytest.mark.parametrize(("name", "method"), METHODS.items())
def test_a_method_has_what_it_says(name: str, method: Method) -> None:
    engine = Engine.load(method=name, context=700, device="cpu")
    engine.generate(TEXT, max_new_tokens=20, ignore_eos=True)
    stats = engine.statistics()
    assert (stats["draft_weights_bytes"] > 0) == method.draft_weights
    assert EngineOptions(method=name).weights_of_draft == ("int4" if method.draft_weights else "none")
    # Without a view of its own the target's planes are all there is.
    assert stats["cache_lower_bytes"] > 0
    assert stats["cache_full_bytes"] == 0


@pytest.mark.parametrize("gamma", ["auto", 1, 4, 16])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 5}])
def test_prompt_lookup_changes_no_token(gamma: int | str, sampling: dict[str, Any]) -> None:
    plain = Engine.load(method="ar", context=700, batch=2, device="cpu")
    drafting = Engine.load(method="ngram", gamma=gamma, context=700, batch=2, device="cpu")  # type: ignore[arg-type]
    options = {"max_new_tokens": 150, "ignore_eos": True, **sampling}
    prompts = [TEXT, "A"]
    assert drafting.generate_batch(prompts, **options) == plain.generate_batch(prompts, **options)
    stats = drafting.statistics()
    assert stats["drafted_tokens"] > 0
    assert stats["draft_pages_mean"] == 0
    if gamma != "auto" and not sampling:
        assert stats["accepted_tokens"] > 0


def test_prompt_lookup_by_rejection_repeats_itself_with_fixed_gamma() -> None:
    engine = Engine.load(method="ngram", gamma=4, accept="rejection", context=700, device="cpu")
    texts = [engine.generate(TEXT, max_new_tokens=200, temperature=0.6, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert (engine.statistics()["accepted_tokens"] or 0) > 0
