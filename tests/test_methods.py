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
    assert EngineOptions(method=name).pages_of_draft == (method.window or "all")
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


@pytest.mark.parametrize("weights", ["int4", "none"])
def test_a_window_reads_as_many_pages_as_it_is_told(weights: str) -> None:
    engine = Engine.load(
        method="window", draft_pages=2, draft_weights=weights, gamma=3, context=1200, device="cpu", batch=1
    )
    plain = Engine.load(method="ar", context=1200, device="cpu")
    text = "".join(f"{number} green bottles stand on the wall. " for number in range(70))
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    assert engine.generate(text, **options) == plain.generate(text, **options)
    assert engine.statistics()["draft_pages_mean"] == 2
    # A context shorter than the window is read whole.
    assert engine.generate(TEXT, **options) == plain.generate(TEXT, **options)
    assert (engine.statistics()["draft_pages_mean"] or 0) < 2


@pytest.mark.parametrize("gamma", ["auto", 4])
def test_a_network_and_copies_change_no_token(gamma: int | str) -> None:
    plain = Engine.load(method="ar", context=1200, batch=2, device="cpu")
    engine = Engine.load(method="quantspec+ngram", gamma=gamma, context=1200, batch=2, device="cpu")  # type: ignore[arg-type]
    options: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
    for prompts in ([TEXT], [TEXT, "A"]):
        assert engine.generate_batch(prompts, **options) == plain.generate_batch(prompts, **options)
    stats = engine.statistics()
    # Greedy decoding of the demo model repeats itself soon; both drafters had their turns.
    if gamma != "auto":
        assert 0 < stats["copied_tokens"] < stats["drafted_tokens"]


def test_prompt_lookup_by_rejection_repeats_itself_with_fixed_gamma() -> None:
    engine = Engine.load(method="ngram", gamma=4, accept="rejection", context=700, device="cpu")
    texts = [engine.generate(TEXT, max_new_tokens=200, temperature=0.6, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert (engine.statistics()["accepted_tokens"] or 0) > 0
