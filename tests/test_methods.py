"""Methods: pages describe each, and prompt lookup is a method like any other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, copy_demo

import quantspec_cli
from quantspec_cli import Engine
from quantspec_cli.errors import UsageError
from quantspec_cli.model import Model, planned
from quantspec_cli.options import COMBINED, METHODS, EngineOptions, Method

ROOT = Path(__file__).parents[1]
DEMO = Path(quantspec_cli.__file__).with_name("demo")
# It repeats itself, so that prompt lookup has matches; greedy decoding of the demo model does so anyway.
TEXT = "The committee met in the morning. The committee met in the evening. The committee"


@pytest.mark.parametrize(("page", "others"), [("decoding", {"METHOD+ngram"}), ("design/drafters", {"METHOD+ngram"})])
def test_pages_describe_every_method(page: str, others: set[str]) -> None:
    """The first table of a page that begins with a column of methods."""
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text[text.index("\n| method |") :].split("\n\n")[0]
    named = re.findall(r"^\| \[?`([\w+-]+)`", table, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == (METHODS.keys() - COMBINED.keys()) | others


def test_emulated_activations_are_noted(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text(TEXT)
    run = ("run", "--text", TEXT, "-n", "2")
    batch = ("batch", str(tmp_path / "docs"), "--out", str(tmp_path / "out"), "-n", "2")
    bench = ("bench", "-p", "0", "-n", "2", "-r", "1")
    for command, flag in ((run, "--method"), (batch, "--method"), (bench, "--methods")):
        for method, count in (("qspec", 1), ("w4", 0)):
            outcome = quantspec(*command, flag, method, "--device", "cpu")
            assert outcome.code == 0, outcome
            assert outcome.stderr.count("activations are emulated") == count, outcome


@pytest.mark.parametrize(("name", "method"), METHODS.items())
def test_a_method_has_the_memory_of_its_table_entry(name: str, method: Method) -> None:
    draft_model = str(DEMO) if method.draft_model else None
    engine = Engine.load(method=name, draft_model=draft_model, context=700, device="cpu")
    engine.generate(TEXT, max_new_tokens=20, ignore_eos=True)
    stats = engine.statistics()
    options = EngineOptions(method=name, draft_model=draft_model)
    assert (stats["draft_weights_bytes"] > 0) == (method.draft_weights or method.draft_model)
    assert options.weights_of_draft == ("int4" if method.draft_weights else "none")
    assert options.pages_of_draft == (method.pages or ("auto" if method.draft_view == "int4" else "all"))
    assert EngineOptions(method="quantspec", gamma=4).pages_of_draft == "all"
    assert ("by_method" in stats) == method.chooses
    # Without a view of its own, only the target's planes are kept.
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
def test_a_window_reads_the_given_number_of_pages(weights: str) -> None:
    engine = Engine.load(
        method="window", draft_pages=2, draft_weights=weights, gamma=3, context=1200, device="cpu", batch=1
    )
    plain = Engine.load(method="ar", context=1200, device="cpu")
    text = "".join(f"{number} green bottles stand on the wall. " for number in range(70))
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    assert engine.generate(text, **options) == plain.generate(text, **options)
    assert engine.statistics()["draft_pages_mean"] == 2
    # A context shorter than the window is read completely.
    assert engine.generate(TEXT, **options) == plain.generate(TEXT, **options)
    assert (engine.statistics()["draft_pages_mean"] or 0) < 2


@pytest.mark.slow
@pytest.mark.parametrize("refresh", [0, 1])
def test_snapkv_reads_its_pages_of_the_prompt_and_all_later_ones(refresh: int) -> None:
    engine = Engine.load(
        method="snapkv", draft_pages=2, draft_refresh=refresh, gamma=3, context=1200, device="cpu", batch=2
    )
    plain = Engine.load(method="ar", context=1200, batch=2, device="cpu")
    text = "".join(f"{number} green bottles stand on the wall. " for number in range(70))
    options: dict[str, Any] = {"max_new_tokens": 150, "ignore_eos": True}
    assert engine.generate(text, **options) == plain.generate(text, **options)
    # The answer makes one or two pages visible.
    mean = engine.statistics()["draft_pages_mean"] or 0
    assert 2 < mean < 4 if refresh == 0 else mean == 2
    # In a batch, with a context too short to choose pages, and a prompt with a cached prefix.
    prompts = [text + " And then", TEXT]
    assert engine.generate_batch(prompts, **options) == plain.generate_batch(prompts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", ["auto", 4])
def test_a_network_and_copies_change_no_token(gamma: int | str) -> None:
    plain = Engine.load(method="ar", context=1200, batch=2, device="cpu")
    engine = Engine.load(method="quantspec+ngram", gamma=gamma, context=1200, batch=2, device="cpu")  # type: ignore[arg-type]
    options: dict[str, Any] = {"max_new_tokens": 300, "ignore_eos": True}
    for prompts in ([TEXT], [TEXT, "A"]):
        assert engine.generate_batch(prompts, **options) == plain.generate_batch(prompts, **options)
    stats = engine.statistics()
    # Greedy decoding of the demo model soon repeats itself; both drafters were used.
    if gamma != "auto":
        assert 0 < stats["copied_tokens"] < stats["drafted_tokens"]
        assert 0 < stats["right_guesses"] <= stats["guessed_tokens"]


def test_prompt_lookup_by_rejection_repeats_itself_with_fixed_gamma() -> None:
    engine = Engine.load(method="ngram", gamma=4, accept="rejection", context=700, device="cpu")
    texts = [engine.generate(TEXT, max_new_tokens=200, temperature=0.6, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert (engine.statistics()["accepted_tokens"] or 0) > 0


@pytest.mark.parametrize("gamma", ["auto", 3])
@pytest.mark.parametrize("method", ["draft-model", "draft-model+ngram"])
def test_a_draft_model_changes_no_token(method: str, gamma: int | str) -> None:
    plain = Engine.load(method="ar", context=700, batch=2, device="cpu")
    drafting = Engine.load(
        method=method, draft_model=DEMO, gamma=gamma, draft_pages=2, context=700, batch=2, device="cpu"
    )  # type: ignore[arg-type]
    options: dict[str, Any] = {"max_new_tokens": 150, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    prompts = [TEXT, "A"]
    assert drafting.generate_batch(prompts, **options) == plain.generate_batch(prompts, **options)
    stats = drafting.statistics()
    # Its weights and its cache are counted.
    assert stats["draft_weights_bytes"] == plain.statistics()["weights_bytes"] == stats["weights_bytes"]
    assert stats["buffer_bytes"] == 2 * plain.statistics()["buffer_bytes"]
    if gamma != "auto":
        assert stats["accepted_tokens"] > 0.8 * (stats["drafted_tokens"] - stats["copied_tokens"])


def test_a_draft_model_by_rejection_is_mostly_accepted() -> None:
    # The model drafts for itself, so p and q differ by rounding only.
    engine = Engine.load(method="draft-model", draft_model=DEMO, gamma=4, accept="rejection", context=700, device="cpu")
    engine.generate(TEXT, max_new_tokens=200, temperature=1.0, seed=1, ignore_eos=True)
    assert (engine.statistics()["acceptance_rate"] or 0) > 0.95


def test_a_draft_model_is_planned() -> None:
    model = Model.open(None)
    alone = planned(model, EngineOptions(method="ar", gamma=0, device="cpu"), context=700)
    both = planned(model, EngineOptions(method="draft-model", draft_model=str(DEMO), device="cpu"), context=700)
    assert both["draft_weights_bytes"] == alone["weights_bytes"] == both["weights_bytes"]
    assert both["cache_upper_bytes"] == 2 * alone["cache_upper_bytes"]
    assert both["planned_bytes"] > alone["planned_bytes"] + alone["weights_bytes"]


def test_a_draft_models_cache_has_no_planes_that_it_does_not_read() -> None:
    """The target's nibbles are for drafts of its own, which `auto` may choose."""
    options: dict[str, Any] = {"method": "auto", "kv_target": "fp16", "draft_pages": 16, "device": "cpu"}
    plans = [
        planned(Model.open(None), EngineOptions(**options, draft_model=draft_model), context=8000)
        for draft_model in (None, str(DEMO))
    ]
    assert plans[0]["cache_upper_bytes"] == plans[1]["cache_upper_bytes"] > 0
    assert plans[0]["cache_full_bytes"] < plans[1]["cache_full_bytes"]


@pytest.mark.parametrize("view", ["fp16", "int8", "int4"])
def test_a_draft_model_keeps_a_cache_of_its_own_view(view: str) -> None:
    options: dict[str, Any] = {"method": "draft-model", "draft_model": str(DEMO), "device": "cpu"}
    with_view = EngineOptions(**options, draft_model_kv=view, gamma=3, draft_pages=2, page_choice="window")
    model = Model.open(None)
    engine = Engine(model, with_view, context=1200)
    plain = Engine.load(method="ar", context=1200, device="cpu")
    text = "".join(f"{number} green bottles stand on the wall. " for number in range(70))
    generation: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    assert engine.generate(text, **generation) == plain.generate(text, **generation)
    stats = engine.statistics()
    assert stats["draft_pages_mean"] == 2
    held = {plane: stats[f"cache_{plane}_bytes"] for plane in ("upper", "lower", "full")}  # type: ignore[literal-required]
    own = {plane: plain.statistics()[f"cache_{plane}_bytes"] for plane in held}  # type: ignore[literal-required]
    # Of the nine pages of a sequence it keeps those of the window, and one that is complete before it is read.
    window = {plane: own[plane] * 3 // 9 for plane in own}
    assert held["upper"] == own["upper"] + (0 if view == "fp16" else window["upper"])
    assert held["lower"] == own["lower"] + (window["lower"] if view == "int8" else 0)
    assert held["full"] == (4 * window["lower"] if view == "fp16" else 0), "16 bits instead of 4"
    assert stats["planned_bytes"] >= sum(held.values())


def test_views_of_a_draft_models_cache_that_would_be_ignored_are_refused(quantspec: Any) -> None:
    run = ("run", "--text", "x", "-n", "5", "--draft-model-kv", "fp16")
    quantspec(*run).assert_error(2, "--draft-model-kv is 'fp16'", "method quantspec has no draft model")
    quantspec(*run, "--method", "auto").assert_error(2, "method auto has no draft model")
    drafting = (*run, "--method", "draft-model", "--draft-model", str(DEMO))
    quantspec(*drafting, "--draft-pages", "4").assert_error(
        2, "--draft-pages is 4", "no scores", "--page-choice window"
    )
    quantspec(*drafting[:-5], "int2", *drafting[-4:]).assert_error(2, "int2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"method": method, "kv_target": "fp16", "draft_pages": pages}, "the cache in FP16 has no scores")
            for method in ("w4", "qspec", "w4+ngram", "qspec+ngram")
            for pages in (4, "auto")
        ),
        ({"method": "draft-model", "draft_model": str(DEMO), "kv_target": "fp16", "draft_pages": 4}, "model's cache"),
        ({"method": "auto", "draft_model": str(DEMO), "draft_model_kv": "fp16"}, "draft model's cache in FP16"),
        ({"method": "quantspec", "gamma": 4, "page_choice": "window"}, "the draft reads all pages"),
        ({"method": "auto", "draft_pages": "all", "page_choice": "window"}, "the draft reads all pages"),
        ({"method": "qspec", "draft_weights": "none"}, "4-bit activations"),
        *(
            ({"method": method, "kv_target": "fp16", "kv_rounding": "paper"}, "quantises no cache")
            for method in ("ar", "w4", "qspec", "window", "ngram")
        ),
    ],
)
def test_settings_without_effect_are_refused(quantspec: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        EngineOptions(**options)
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    quantspec("run", "--text", "x", *flags).assert_error(2, words)


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"method": method, "kv_target": "fp16", "draft_pages": 4}
            for method in ("quantspec", "kv4", "auto", "window")
        ),
        *({"method": method, "kv_target": "fp16", "draft_pages": "all"} for method in ("w4", "qspec")),
        {"method": "w4", "kv_target": "fp16", "draft_pages": 4, "page_choice": "window"},
        {"method": "auto", "draft_model": str(DEMO), "draft_model_kv": "fp16", "draft_pages": "all"},
        {"method": "auto", "draft_model": str(DEMO), "kv_target": "fp16"},
        {"method": "quantspec", "kv_target": "fp16", "kv_rounding": "paper"},
        {"method": "draft-model", "draft_model": str(DEMO), "draft_model_kv": "int8", "kv_target": "fp16"}
        | {"kv_rounding": "paper", "draft_pages": 4},
    ],
)
def test_settings_with_an_effect_are_taken(options: dict[str, Any]) -> None:
    EngineOptions(**options)


def test_measured_settings_without_effect_are_refused(quantspec: Any) -> None:
    bench = ("bench", "-p", "0", "-n", "12", "-d", "8", "-r", "1", "--device", "cpu", "--draft-pages", "4")
    no_scores = "the cache in FP16 has no scores"
    quantspec(*bench, "--methods", "ar,w4-fp16").assert_error(
        2, "--draft-pages is 4", no_scores, "--page-choice window"
    )
    kept = ("--draft-model", str(DEMO), "--draft-model-kv", "fp16")
    model = ("--methods", "ar,auto", *kept)
    quantspec(*bench, *model).assert_error(2, "draft model's cache in FP16 has no scores", "--draft-model-kv int8")
    # The view of the draft model's cache is no remedy for the target's.
    quantspec(*bench, "--methods", "w4-fp16,auto", *kept).assert_error(2, no_scores, "or --draft-pages all")
    window = ("--page-choice", "window", "--methods")
    quantspec(*bench, *window, "ar").assert_error(2, "--draft-pages is 4", "no method of --methods drafts by pages")
    choice = ("no method of --methods chooses pages", "--draft-pages N")
    quantspec(*bench, *window, "ar,window,snapkv").assert_error(2, *choice)
    quantspec(*bench[:-2], *window, "quantspec").assert_error(2, "no method of --methods chooses pages")
    score = ("eval", "--device", "cpu", "--tokens", "40", "--decode", "4", "--draft-pages", "4")
    quantspec(*score, *model[2:]).assert_error(2, "--draft-model-kv is fp16", "no scores", "leave out --draft-pages")


def test_a_draft_model_that_does_not_fit_is_refused(quantspec: Any, tmp_path: Path) -> None:
    run = ("run", "--text", "x", "-n", "5", "--device", "cpu", "--method", "draft-model")
    quantspec(*run).assert_error(2, "method draft-model has no draft model", "--draft-model")
    wrong = ("run", "--text", "x", "-n", "5", "--draft-model", str(DEMO))
    quantspec(*wrong).assert_error(2, "--draft-model is", "method quantspec reads no draft model")
    quantspec(*run, "--draft-model", str(tmp_path / "none")).assert_error(1, "none")
    short = copy_demo(tmp_path / "short", max_position_embeddings=256)
    outcome = quantspec(*run, "-c", "300", "-n", "290", "--draft-model", str(short))
    outcome.assert_error(3, "context of 256", "the model's is")
    # The same number of tokens, with two exchanged.
    other = copy_demo(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[500:502]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    quantspec(*run, "--draft-model", str(other)).assert_error(1, "another tokenizer", "token 500 is")


@pytest.mark.slow
def test_bench_measures_a_draft_model(quantspec: Any) -> None:
    bench = ("bench", "-p", "0", "-n", "12", "-d", "8", "-r", "1", "-g", "2", "-o", "json", "--device", "cpu")
    rows = quantspec(*bench, "--methods", "ar,draft-model,quantspec+ngram", "--draft-model", str(DEMO)).json
    plain, drafting, _ = rows
    assert drafting["acceptance_rate"] > 0.9
    # A draft of two tokens and a verification read the model's bytes three times, for up to three tokens.
    assert drafting["bytes_per_token"] > 0.9 * plain["bytes_per_token"]
    measured = ("--methods", "ar,draft-model,snapkv", "--draft-model", str(DEMO), "--draft-pages", "2")
    kept = ("--draft-model-kv", "fp16", "--page-choice", "window", "--draft-refresh", "1")
    rows = {row["method"]: row for row in quantspec(*bench, *measured, *kept).json}
    assert rows["draft-model"]["draft_model_kv"] == "fp16"
    assert rows["snapkv"]["draft_refresh"] == 1
    assert (rows["draft-model"]["page_choice"], rows["snapkv"]["page_choice"]) == ("window", "snap")
    assert "draft_refresh" not in rows["draft-model"]
    quantspec(*bench, *measured, *kept[:2]).assert_error(2, "--draft-pages is 2", "--page-choice window")
    quantspec(*bench, *kept[:2]).assert_error(2, "--draft-model-kv is fp16, but there is no draft model")
    quantspec(*bench, *kept[-2:]).assert_error(2, "--draft-refresh is 1", "snapkv")
    quantspec(*bench, "--methods", "draft-model").assert_error(2, "--methods has draft-model")
    quantspec(*bench, "--draft-model", str(DEMO)).assert_error(2, "no method of --methods uses it")


LONG = "".join(f"{number} green bottles stand on the wall. " for number in range(120))


@pytest.mark.parametrize(
    ("weights", "target"), [("int4", "int8"), ("int4", "fp16"), ("int4", "int4"), ("none", "int8")]
)
def test_auto_changes_no_token_and_tells_what_drafted(weights: str, target: str) -> None:
    plain = Engine.load(method="ar", kv_target=target, context=2000, device="cpu")
    # With a fixed gamma every round drafts, so candidates are compared only with each other.
    engine = Engine.load(
        method="auto", gamma=3, draft_weights=weights, draft_pages=2, kv_target=target, context=2000, device="cpu"
    )
    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.9, "seed": 4}
    assert engine.generate(LONG, **options) == plain.generate(LONG, **options)
    stats = engine.statistics()
    shares = stats["by_method"]
    assert set(shares) <= {"quantspec", "kv4", "w4", "ngram", "ar"}
    for name in ("rounds", "drafted_tokens", "accepted_tokens"):
        assert sum(share[name] for share in shares.values()) == stats[name]  # type: ignore[literal-required]
    networks = [share for name, share in shares.items() if name not in {"ngram", "ar"}]
    assert networks
    assert all(share["draft_pages_mean"] == 2 for share in networks)


def test_auto_plans_what_it_may_read_and_refuses_nothing_else() -> None:
    model = Model.open(None)
    fixed, auto = (
        planned(model, EngineOptions(method=method, device="cpu"), context=700) for method in ("quantspec", "auto")
    )
    # Other programs use memory meanwhile, and the plan counts what this process has taken, which the first call increases.
    assert auto.pop("planned_bytes") == pytest.approx(fixed.pop("planned_bytes"), abs=4 << 20)
    free = ("available_bytes", "largest_batch", "longest_context")
    assert {name: auto[name] for name in auto if name not in free} == {
        name: fixed[name] for name in auto if name not in free
    }
    with_draft = planned(model, EngineOptions(method="auto", draft_model=str(DEMO), device="cpu"), context=700)
    assert with_draft["draft_weights_bytes"] == auto["draft_weights_bytes"] + auto["weights_bytes"]


def test_auto_with_a_draft_model_tries_it(quantspec: Any) -> None:
    flags = ("run", "--text", TEXT, "-n", "200", "--ignore-eos", "--device", "cpu", "--method", "auto")
    plain = quantspec(*flags[:-1], "ar").stdout
    outcome = quantspec(*flags, "--draft-model", str(DEMO))
    assert outcome.stdout == plain
    assert "rounds by method: " in outcome.stderr


def test_bench_measures_auto(quantspec: Any) -> None:
    bench = ("bench", "-p", "0", "-n", "12", "-d", "8", "-r", "1", "-g", "2", "-o", "json", "--device", "cpu")
    plain, auto = quantspec(*bench, "--methods", "ar,auto", "--draft-model", str(DEMO)).json
    assert (auto["method"], auto["draft_pages"]) == ("auto", "auto")
    assert sum(auto["rounds_by_method"].values()) > 0
    assert "rounds_by_method" not in plain
    # Each round verifies, and reads weights again for its drafts.
    assert auto["bytes_per_token"] > 0.5 * plain["bytes_per_token"]
