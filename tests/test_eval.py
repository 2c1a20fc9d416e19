"""`quantspec eval`: scores agree with NumPy's, and with the acceptance measured on the seed models."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_numpy
import numpy as np
import pytest
from conftest import exact_activations

from quantspec_cli import eval as evaluation
from quantspec_cli import hub
from quantspec_cli.bench import grid
from quantspec_cli.model import Model
from quantspec_cli.options import COMBINED, METHODS
from quantspec_cli.tokenizer import Tokenizer

# Methods of `eval`: networks that draft for themselves.
NETWORKS = [
    name
    for name, method in METHODS.items()
    if method.draft_view and not (method.chooses or method.draft_model or name in COMBINED)
]
# Three pages and a piece: from position 256 on, queries read quantised pages.
TOKENS = 400


@pytest.fixture(scope="module")
def scores() -> dict[str, Any]:
    from quantspec_cli import _native

    return _native.evaluate(str(hub.demo()), sample())


def sample() -> list[int]:
    return Model.open(None).tokenizer.encode(evaluation.SAMPLE.read_text(encoding="utf-8"))[:TOKENS]


@pytest.mark.slow
def test_every_drafter_is_decoded_by_gamma(quantspec: Any) -> None:
    flags = ("eval", "--tokens", "330", "--context", "300", "--device", "cpu", "--decode", "60")
    found = quantspec(
        *flags, "--depths", "40,700", "--draft-pages", "2", "--draft-model", str(hub.demo()), "--json"
    ).json
    rows = {(row["depth"], row["method"], row["draft_pages"]): row for row in found["decoded"]}
    ways = {(method, pages) for _, method, pages in rows}
    assert ways == {
        (name, pages)
        for name, method in METHODS.items()
        if method.drafts and not method.chooses
        for pages in (
            {method.pages or "all", 2} if method.draft_view and name not in COMBINED else {method.pages or "all"}
        )
    }
    for row in rows.values():
        assert len(row["acceptance_rate_per_position"]) == len(row["tokens_per_round"]) == 8
        # All tokens but the first of each round are accepted drafts; the last round may be cut.
        assert row["tokens_per_round"][-1] * row["rounds"] == pytest.approx(60, abs=9)
        assert row["tokens_per_round"][0] == pytest.approx(1 + row["acceptance_rate_per_position"][0])
    # The model drafts for itself. With 5 visible pages another choice of pages has another draft.
    assert rows[700, "draft-model", "all"]["acceptance_rate"] > 0.9
    assert rows[700, "draft-model", 2] != rows[700, "draft-model", "all"] | {"draft_pages": 2}
    outcome = quantspec(*flags)
    assert "tokens per round after 300" in outcome.stdout


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--decode", "0"), 2, "--decode is 0"),
        (("--depths", "40"), 2, "--depths without --decode"),
        (("--draft-model-kv", "int4"), 2, "--draft-model-kv without --decode"),
        (("--decode", "5", "--draft-model-kv", "int4"), 2, "there is no draft model"),
        (("--decode", "5", "--depths", "0"), 2, "--depths is 0"),
        (("--decode", "5", "--depths", "1x"), 2, "--depths"),
        (("--decode", "5", "--depths", "200000"), 3, "decoded tokens take 200006 tokens"),
        (("--decode", "5", "--depths", "200000"), 3, "hint: lower --depths to at most 131066\n"),
        (("--decode", "200000"), 3, "hint: lower --decode to at most 131070\n"),
        (("--decode", "100000", "--depths", "40,50000"), 3, "--depths to at most 31071 or --decode to at most 81071"),
        (("--decode", "200000", "--depths", "200000"), 3, "hint: lower --depths and --decode\n"),
        (("--decode", "5", "--depths", "9000"), 1, "9001 were requested"),
        (("--decode", "5", "--group", "64"), 2, "--decode reads the engine's own cache"),
    ],
)
def test_wrong_values_of_decoding_are_refused(quantspec: Any, flags: tuple[str, ...], code: int, words: str) -> None:
    quantspec("eval", "--tokens", "20", "--device", "cpu", *flags).assert_error(code, words)


@pytest.mark.slow
def test_scores_agree_with_numpy(scores: dict[str, Any]) -> None:
    ids = np.array(sample())
    model = llama_numpy.Llama(*llama_numpy.load(hub.demo()))
    draft = llama_numpy.Llama(model.config, model.tensors, draft=True)
    full = llama_numpy.evaluate(model, ids, "fp16", {})["target"][:-1]
    found = llama_numpy.evaluate(model, ids, "int8", {"kv4": (model, "int4"), "quantspec": (draft, "int4")})
    int8 = found["target"][:-1]
    nll = {name: -logs[np.arange(TOKENS - 1), ids[1:]].mean() for name, logs in (("fp16", full), ("int8", int8))}
    kld = (np.exp(full) * (full - int8)).sum(-1).mean()
    targets, drafts = scores["targets"], scores["drafts"]
    # The engine rounds activations to BF16 (2⁻⁹); NumPy rounds only what the method rounds.
    for name, expected in nll.items():
        assert targets[name]["nll"] == pytest.approx(expected, abs=0.005)
        assert targets[name]["perplexity"] == pytest.approx(math.exp(targets[name]["nll"]))
    assert targets["int8"]["kld"] < kld + 2e-5
    for name, tolerance in (("kv4", 0.003), ("quantspec", 0.006)):
        logs = found[name][:-1]
        acceptance = np.exp(np.minimum(logs, int8)).sum(-1).mean()
        assert drafts[name]["acceptance"] == pytest.approx(acceptance, abs=tolerance)
        assert drafts[name]["top1"] == pytest.approx((logs.argmax(-1) == int8.argmax(-1)).mean(), abs=0.02)


# Scores of several caches, in a process whose kernels have f32 activations: BF16 ones would hide what groups change.
SCORES = """
import json, sys
from quantspec_cli import _native
model, ids, caches = json.load(sys.stdin)
caches = [cache and tuple(cache) for cache in caches]
print(json.dumps([_native.evaluate(model, ids, context=256, device="cpu", ablated=cache) for cache in caches]))
"""


@pytest.mark.slow
def test_ablations_agree_with_numpy() -> None:
    own = llama_numpy.Groups()
    caches = [
        own,
        llama_numpy.Groups(keys="token", size=32),
        llama_numpy.Groups(values="channel", size=64),
        llama_numpy.Groups(truncated=True),
    ]
    # From position 256 on, rows read a quantised page.
    ids = sample()
    found = subprocess.run(
        [sys.executable, "-c", SCORES],
        input=json.dumps([str(hub.demo()), ids, [None, *(dataclasses.astuple(cache) for cache in caches)]]),
        capture_output=True,
        env=exact_activations(),
        text=True,
        check=True,
    )
    engine, *ablated = json.loads(found.stdout)
    model, tokens = llama_numpy.Llama(*llama_numpy.load(hub.demo())), np.array(ids)
    full = llama_numpy.evaluate(model, tokens, "fp16", {})["target"][256:-1]
    for scores, cache in zip(ablated, caches, strict=True):
        expected = llama_numpy.evaluate(model, tokens, "int8", {"kv4": (model, "int4")}, cache)
        int8, kv4 = expected["target"][256:-1], expected["kv4"][256:-1]
        int4 = llama_numpy.evaluate(model, tokens, "int4", {}, cache)["target"][256:-1]
        targets = scores["targets"]
        # Any two of these caches differ by more than the tolerances.
        for name, logs, tolerance in (("int8", int8, 0.15), ("int4", int4, 0.02)):
            assert targets[name]["kld"] == pytest.approx((np.exp(full) * (full - logs)).sum(-1).mean(), rel=tolerance)
        acceptance = np.exp(np.minimum(kv4, int8)).sum(-1).mean()
        assert scores["drafts"]["kv4"]["acceptance"] == pytest.approx(acceptance, abs=2e-4), cache
        # Targets with an FP16 cache do not depend on its groups.
        assert targets["fp16"] == engine["targets"]["fp16"]
        # The draft w4 reads the target's cache, whose groups affect its score by rounding only.
        assert scores["drafts"]["w4"]["acceptance"] == pytest.approx(engine["drafts"]["w4"]["acceptance"], abs=1e-3)
    # An ablation with the engine's own groups differs by f16 rounding only.
    assert own == llama_numpy.OWN
    for name in ("int8", "int4"):
        assert ablated[0]["targets"][name]["nll"] == pytest.approx(engine["targets"][name]["nll"], abs=2e-4)
    for name in ("quantspec", "kv4", "w4"):
        acceptance = engine["drafts"][name]["acceptance"]
        assert ablated[0]["drafts"][name]["acceptance"] == pytest.approx(acceptance, abs=2e-3), name


def test_fewer_bits_diverge_more(scores: dict[str, Any]) -> None:
    targets, drafts = scores["targets"], scores["drafts"]
    assert list(targets) == ["fp16", "int8", "int4"]
    assert list(drafts) == NETWORKS
    # The text is shorter than the window.
    assert drafts["window"] == drafts["w4"]
    # Without a prompt there is no choice of pages.
    assert drafts["snapkv"] == drafts["quantspec"]
    assert set(targets["fp16"]) == {"nll", "perplexity"}
    assert 0 < targets["int8"]["kld"] < targets["int4"]["kld"] < 0.01
    assert targets["int8"]["top1"] >= 0.99
    assert 1 > drafts["kv4"]["acceptance"] > drafts["quantspec"]["acceptance"] > 0.85


@pytest.mark.slow
def test_context_is_read_and_not_scored(scores: dict[str, Any]) -> None:
    from quantspec_cli import _native

    ids = sample()
    later = _native.evaluate(str(hub.demo()), ids, context=300)
    assert (later["tokens"], later["positions"]) == (TOKENS, TOKENS - 1 - 300)
    # The score of the whole text is the mean of its parts' scores: full-precision prefill and an FP16 cache agree up to
    # rounding.
    first = _native.evaluate(str(hub.demo()), ids[:301])["targets"]["fp16"]["nll"]
    whole = (first * 300 + later["targets"]["fp16"]["nll"] * later["positions"]) / (TOKENS - 1)
    assert whole == pytest.approx(scores["targets"]["fp16"]["nll"], abs=0.005)


@pytest.mark.slow
def test_scores_are_the_same_for_every_thread_count(scores: dict[str, Any]) -> None:
    from quantspec_cli import _native

    assert _native.evaluate(str(hub.demo()), sample()[:150], threads=1) == _native.evaluate(
        str(hub.demo()), sample()[:150], threads=3
    )


def test_json_has_the_contracts_fields(quantspec: Callable[..., Any]) -> None:
    outcome = quantspec("eval", "--tokens", "80", "--json")
    assert outcome.code == 0, outcome
    found = outcome.json
    assert (found["model"], found["device"], found["tokens"], found["positions"]) == ("demo", "cpu", 80, 79)
    assert found["simd"] in {"amx", "avx512", "avx2", "neon", "scalar"}
    assert set(found["targets"]["int8"]) == {"nll", "perplexity", "kld", "top1"}
    assert set(found["drafts"]["quantspec"]) == {"acceptance", "top1"}
    assert outcome.stderr == ""


@pytest.mark.slow
def test_an_ablation_is_named(quantspec: Callable[..., Any]) -> None:
    command = ["eval", "--tokens", "40", "--device", "cpu"]
    plain = quantspec(*command, "--json").json
    assert "ablation" not in plain
    assert plain.pop("kv_rounding") == "balanced"
    for flags, ablation in [
        (["--k-axis", "token"], ("token", "token", 128, "balanced")),
        (["--v-axis", "channel", "--kv-rounding", "paper"], ("channel", "channel", 128, "paper")),
        (["--group", "32"], ("channel", "token", 32, "balanced")),
        (["--kv-rounding", "truncate"], ("channel", "token", 128, "truncate")),
    ]:
        found = quantspec(*command, *flags, "--json").json
        assert found.pop("ablation") == dict(zip(("k_axis", "v_axis", "group", "kv_rounding"), ablation, strict=True))
        # The text is shorter than a page, so no score depends on groups.
        assert found == plain
    lines = quantspec(*command, "--k-axis", "token", "--group", "64").stdout.splitlines()
    assert lines[1:3] == ["cache: keys by token, values by token, groups of 64, rounding balanced", ""]


@pytest.mark.slow
def test_another_rounding_is_named(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    command = ["eval", "--tokens", "40", "--device", "cpu", "--kv-rounding", "paper"]
    assert quantspec(*command, "--json").json["kv_rounding"] == "paper"
    report = tmp_path / "report.html"
    lines = quantspec(*command, "--report", str(report)).stdout.splitlines()
    assert lines[1:3] == ["cache: rounding paper", ""]
    assert "rounding paper" in report.read_text()


@pytest.mark.slow
def test_choices_of_pages_beside_as_many_of_the_best_tokens(quantspec: Callable[..., Any]) -> None:
    command = ["eval", "--tokens", "962", "--context", "900", "--draft-pages", "2,3,100"]
    found = quantspec(*command, "--json").json
    assert list(found["page_choices"]) == ["2", "3", "100"]
    assert all(list(scores) == ["best", "snap", "window", "tokens"] for scores in found["page_choices"].values())
    # Six pages are visible: with 100 every choice is all of them.
    whole = found["drafts"]["quantspec"]
    for name, score in found["page_choices"]["100"].items():
        assert score["acceptance"] == pytest.approx(whole["acceptance"], abs=2e-3 if name == "tokens" else 0)
    # Single tokens are the finest choice there is.
    for scores in (found["page_choices"]["2"], found["page_choices"]["3"]):
        distances = {name: abs(score["acceptance"] - whole["acceptance"]) for name, score in scores.items()}
        assert distances["tokens"] < 0.01 < max(distances.values())
    command[2] = "902"
    lines = quantspec(*command).stdout.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == ["100", "best", "snap", "window", "tokens"]


def test_json_goes_to_stdout_and_the_report_to_the_file(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    command = ["eval", "--tokens", "60"]
    outcome = quantspec(*command, "--json", "--output", str(out))
    assert (outcome.code, outcome.json["tokens"]) == (0, 60)
    assert out.read_text(encoding="utf-8") == quantspec(*command).stdout


def test_a_file_that_cannot_be_written_costs_no_score_of_the_document(
    quantspec: Callable[..., Any], tmp_path: Path
) -> None:
    command = ["eval", "--tokens", "9", "--device", "cpu", "--json"]
    page = tmp_path / "page.html"
    outcome = quantspec(*command, "--output", "/dev/full", "--report", str(page))
    document = outcome.json
    assert (outcome.code, document.pop("error")["kind"]) == (1, "io")
    assert document == quantspec(*command).json
    assert page.read_text().endswith("</html>\n")


def test_the_table_has_a_row_for_every_target_and_draft(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    outcome = quantspec("eval", "--tokens", "258", "--context", "228", "--output", str(out))
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    lines = out.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "demo on sample.txt: 29 positions, teacher-forced"
    assert [line.split()[0] for line in lines if line] == [
        *("demo", "target", "fp16", "int8", "int4", "draft", *NETWORKS),
    ]


def test_a_text_without_a_quantised_page_is_noted(quantspec: Callable[..., Any]) -> None:
    """The shortest text with a page has no note, and its views differ."""
    for tokens, noted in (257, True), (258, False):
        command = ["eval", "--tokens", str(tokens), "--context", "250"]
        assert ("has no quantised page" in quantspec(*command).stderr) == noted
        found = quantspec(*command, "--json")
        assert (found.json["targets"]["int4"]["kld"] == 0, found.stderr) == (noted, "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--tokens", "1"], 2, ("tokens is 1",)),
        (["--tokens", "many"], 2, ("many",)),
        (["--context", "-1"], 2, ("context is -1",)),
        (["--draft-pages", "1"], 2, ("draft-pages is 1", "at least 2")),
        (["--draft-pages", "all"], 2, ("--draft-pages has 'all'",)),
        (["--tokens", "5000"], 1, ("sample.txt has 1713 tokens; 5000 were requested",)),
        (
            ["--tokens", "40", "--context", "39"],
            2,
            ("--tokens 40 with --context 39 leaves no token", "--tokens 41 or more, or --context 38 or less"),
        ),
        (["--context", "1712"], 1, ("sample.txt has 1713 tokens; 1714 were requested", "--context")),
        (["--tokens", "1714", "--context", "9"], 1, ("sample.txt has 1713 tokens; 1714 were requested",)),
        (["--tokens", "200000"], 3, ("200000 tokens", "context of 131072", "--tokens 131072")),
        (["--k-axis", "head"], 2, ("'head'", "'channel', 'token'")),
        (["--group", "48"], 2, ("'48'", "'32', '64', '128'")),
        (["--kv-rounding", "floor"], 2, ("'floor'", "'truncate'")),
        (["--v-axis", "channel", "--draft-pages", "4"], 2, ("--draft-pages reads the engine's own cache",)),
        (["--kv-rounding", "truncate", "--sensitivity"], 2, ("--sensitivity reads the engine's own", "leave out")),
        (["--prompt", "/no/such/book"], 1, ("/no/such/book does not exist",)),
        (["--output", "/no/such/folder/report"], 1, ("/no/such/folder",)),
        (["--device", "tpu"], 2, ("tpu",)),
        (["--threads", "0"], 2, ("threads is 0",)),
        (["--model", "/no/such/model"], 1, ("/no/such/model",)),
    ],
)
def test_bad_input_is_one_error_with_its_exit_code(
    quantspec: Callable[..., Any], arguments: list[str], code: int, words: tuple[str, ...]
) -> None:
    quantspec("eval", *arguments).assert_error(code, *words)


def test_the_token_after_the_context_is_only_fed(quantspec: Callable[..., Any]) -> None:
    for context in (0, 1, 38):
        found = quantspec("eval", "--tokens", "40", "--context", str(context), "--json").json
        assert (found["tokens"], found["positions"]) == (40, 40 - context - 1)


def test_names_cannot_move_the_cursor(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    text, model = tmp_path / "a\n\x1b[31mb", tmp_path / "m\n\x1b[2J"
    text.write_text("It was a dark and stormy night; the rain fell in torrents.")
    model.symlink_to(hub.demo())
    arguments = ["eval", "-p", str(text), "-m", str(model)]
    report = quantspec(*arguments).stdout
    assert "\x1b" not in report
    assert "a \N{REPLACEMENT CHARACTER}[31mb: " in report.splitlines()[0]
    found = quantspec(*arguments, "--json").json
    assert (found["prompt"], found["model"]) == (str(text), str(model))


def test_decoding_that_does_not_fit_is_refused_before_scoring(
    quantspec: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantspec_cli._native.evaluate", None)
    config = json.loads((hub.demo() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 28}))
    for file in hub.demo().iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    outcome = quantspec(
        "eval", "-m", str(tmp_path), "--decode", str((1 << 28) - 2), "--tokens", "40", "--device", "cpu"
    )
    outcome.assert_error(3, f"a sequence of {1 << 28} tokens", "shorten the text or the answer")


@pytest.mark.parametrize("flags", [(), ("--sensitivity",)])
def test_a_text_that_does_not_fit_has_the_remedies_of_eval(
    quantspec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    from quantspec_cli import _native

    def refuse(*_: Any, **__: Any) -> None:
        error = _native.NativeError()
        error.kind, error.message, error.hint = (
            "does_not_fit",
            "3 sequences of 400 tokens: 9 GB needed",
            "fewer at once",
        )
        raise error

    monkeypatch.setattr(_native, "sensitivity" if flags else "evaluate", refuse)
    quantspec("eval", "--tokens", "400", *flags).assert_error(
        3, "3 sequences of 400 tokens", "hint: every view", "--tokens"
    )


def test_values_that_are_not_text(quantspec: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "text"
    for raw, word in ((b"", "empty"), (b" \n", "white space"), (b"\xff\xfe", "UTF-16"), (b"a\0", "binary")):
        path.write_bytes(raw)
        quantspec("eval", "-p", str(path)).assert_error(1, word)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["eval"], 3, ("characters and more than 131072 tokens", "--tokens 131072")),
        (["eval", "--tokens", "200000"], 3, ("200000 tokens", "--tokens 131072")),
        (["eval", "--tokens", "20"], 0, ()),
        (["bench", "-d", "20", "-p", "0", "-n", "2", "-r", "1", "--methods", "ar"], 0, ()),
    ],
)
def test_a_huge_text_is_not_encoded_whole(
    quantspec: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: tuple[str, ...],
) -> None:
    encode = Tokenizer.encode

    def bounded(self: Tokenizer, text: str) -> list[int]:
        assert len(text) < 100_000
        return encode(self, text)

    book = tmp_path / "book"
    book.write_text("a few words " * 2_000_000)
    monkeypatch.setattr(Tokenizer, "encode", bounded)
    outcome = quantspec(*arguments, "-t", "2", "--prompt", str(book))
    assert outcome.code == code, outcome
    for word in words:
        assert word in outcome.stderr


def test_the_prompt_is_not_overwritten(quantspec: Callable[..., Any], document: Path) -> None:
    before = document.read_text()
    quantspec("eval", "-p", str(document), "-o", str(document)).assert_error(2, "is also an input")
    assert document.read_text() == before


@pytest.mark.slow
def test_progress_shows_on_a_terminal_only() -> None:
    command = [sys.executable, "-m", "quantspec_cli", "eval", "--tokens", "300", "--device", "cpu"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    piped = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert piped.stderr == b""
    terminal, end = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=environment) as child:
        os.close(end)
        seen = b""
        with suppress(OSError):  # the terminal closes when the command ends
            while chunk := os.read(terminal, 1 << 16):
                seen += chunk
        assert child.stdout is not None
        assert child.stdout.read() == piped.stdout
    os.close(terminal)
    assert child.returncode == 0
    assert seen.index(b"loading weights") < seen.index(b"scoring")


def test_acceptance_of_a_trained_model() -> None:
    """Results of an independent implementation (float32 tensors), to ±.01, for one document."""
    folder = os.environ.get("QUANTSPEC_TEST_MODELS")
    if folder is None:
        pytest.skip("needs QUANTSPEC_TEST_MODELS, a directory that holds the model seed-mha")
    from quantspec_cli import _native

    directory = Path(folder) / "seed-mha"
    ids = Model.open(str(directory)).tokenizer.encode(gzip.decompress(grid.BOOK.read_bytes()).decode())
    middle = (len(ids) - 8192) // 2
    found = _native.evaluate(str(directory), ids[middle : middle + 8192], context=8192 - 512)
    assert found["positions"] == 511
    assert found["targets"]["int8"]["kld"] < 1e-4
    assert found["targets"]["int8"]["top1"] >= 0.995
    assert found["drafts"]["kv4"]["acceptance"] == pytest.approx(0.993, abs=0.01)
    assert found["drafts"]["quantspec"]["acceptance"] == pytest.approx(0.9435, abs=0.01)
