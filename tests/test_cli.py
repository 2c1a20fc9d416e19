"""`quantspec run` and other commands as a person or script uses them; the engine is the toy."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import DEMO, Outcome, copy_demo, ids_of
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quantspec_cli import __version__, tokenizer
from quantspec_cli.cli import cli
from quantspec_cli.engine import Statistics
from quantspec_cli.errors import DoesNotFitError
from quantspec_cli.model import Model, Prompt
from quantspec_cli.options import METHODS

Run = Callable[..., Outcome]

STATS = {
    *("load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s", "rounds", "gamma_mean"),
    *("drafted_tokens", "accepted_tokens", "acceptance_rate", "mean_acceptance_length", "acceptance_rate_per_position"),
    *("weights_bytes", "draft_weights_bytes", "cache_upper_bytes", "cache_lower_bytes", "buffer_bytes"),
    *("planned_bytes", "peak_bytes"),
}


def test_text_to_stdout_statistics_to_stderr(fake: Any, quantspec: Run, document: Path) -> None:
    fake.answer = ids_of(" The scene lay in London.")
    outcome = quantspec("run", "--prompt", str(document), "-n", str(len(fake.answer)))
    assert outcome.code == 0
    assert outcome.stdout == " The scene lay in London.\n"
    for words in ("book.txt", "prompt tokens", "new tokens", "prefill", "decode", "gamma", "accepted", "cache", "peak"):
        assert words in outcome.stderr
    assert "\x1b" not in outcome.stdout + outcome.stderr


def test_a_flag_without_its_value_names_the_command(quantspec: Run) -> None:
    quantspec("bench", "--compare", "a").assert_error(2, "requires 2 arguments", "hint: see quantspec bench --help")
    quantspec("run", "-m").assert_error(2, "requires an argument", "hint: see quantspec run --help")
    quantspec("--config").assert_error(2, "requires an argument", "hint: see quantspec --help")


def test_json_is_one_document_with_the_contract_s_fields(fake: Any, quantspec: Run, document: Path) -> None:
    outcome = quantspec("run", "-p", str(document), "-n", "20", "--gamma", "4", "--seed", "3", "--json")
    assert (outcome.code, outcome.stderr) == (0, "")
    report = outcome.json
    expected = {
        "quantspec": __version__,
        "model": "demo",
        "device": "cpu",
        "method": "quantspec",
        "kv_target": "int8",
        "draft_weights": "int4",
        "draft_pages": "all",
        "accept": "greedy",
        "gamma": 4,
        "seed": 3,
    }
    assert {key: report[key] for key in expected} == expected
    assert report["stats"].keys() >= STATS
    (result,) = report["results"]
    assert result.keys() == {"prompt", "prompt_tokens", "new_tokens", "tokens", "text", "stop_reason", "thinking"}
    assert result["prompt"] == str(document)
    assert result["new_tokens"] == len(result["tokens"]) == 20
    assert result["stop_reason"] == "length"
    assert result["text"] == Tokenizer.from_file(str(DEMO / "tokenizer.json")).decode(result["tokens"])


@pytest.mark.slow
def test_every_method_and_gamma_prints_the_same_text(fake: Any, quantspec: Run, document: Path) -> None:
    texts = {
        quantspec(
            *("run", "-p", str(document), "-n", "60", "--method", method, "--gamma", gamma),
            *(("--draft-model", str(DEMO)) if of_method.draft_model else ()),
        ).stdout
        for method, of_method in METHODS.items()
        for gamma in (("0", "1", "5", "16", "auto") if of_method.drafts else ("0", "auto"))
    }
    assert len(texts) == 1


@pytest.mark.slow
def test_unused_draft_weights_are_reported_as_none(fake: Any, quantspec: Run) -> None:
    for method in METHODS:
        draft = ("--draft-model", str(DEMO)) if METHODS[method].draft_model else ()
        report = quantspec("run", "--text", "x", "-n", "5", "--method", method, *draft, "--json").json
        expected = "int4" if METHODS[method].draft_weights else "none"
        assert (report["method"], report["draft_weights"]) == (method, expected)
    # Reported values can be passed as flags.
    for method in ("kv4", "ngram", "ar"):
        flags = (
            "--method",
            method,
            "--draft-weights",
            "none",
            "--draft-precision",
            "none",
            "--draft-pages",
            "all",
            "--gamma",
            "0",
        )
        assert quantspec("run", "--text", "x", "-n", "5", *flags).code == 0


def test_rates_are_null_if_nothing_was_drafted(fake: Any, quantspec: Run) -> None:
    report = quantspec("run", "--text", "x", "-n", "5", "--method", "ar", "--json").json
    assert report["gamma"] == 0
    assert report["stats"]["acceptance_rate"] is None
    assert "no speculation" in quantspec("run", "--text", "x", "-n", "5", "--method", "ar").stderr


# Fields of `stats` that are null if no round decoded, and if none drafted.
WITHOUT_ROUNDS = {"gamma_mean", "decode_tokens_per_s", "batch_mean"}
WITHOUT_DRAFTS = {"draft_pages_mean", "acceptance_rate", "mean_acceptance_length", "acceptance_rate_per_position"}


@pytest.mark.parametrize(
    ("flags", "nulls"),
    [
        (["-n", "5", "--gamma", "2"], set()),
        (["-n", "5", "--method", "ar"], WITHOUT_DRAFTS),
        (["-n", "5", "--gamma", "0"], WITHOUT_DRAFTS),
        (["-n", "1"], WITHOUT_ROUNDS | WITHOUT_DRAFTS),
    ],
)
def test_fields_without_a_value_are_null(quantspec: Run, flags: list[str], nulls: set[str]) -> None:
    stats = quantspec("run", "--text", "x", *flags, "--json", "--device", "cpu").json["stats"]
    # Only Linux reports the peak. No text here is as long as a page.
    assert {name for name, value in stats.items() if value is None} - {"peak_bytes"} == {*nulls, "pool_waste"}


def test_the_text_of_several_answers(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    command = ["run", "--text", "x", "--text", "y", "-n", "9"]
    texts = [result["text"] for result in quantspec(*command, "--json", "-o", str(path)).json["results"]]
    assert not any(text.endswith("\n") for text in texts)
    assert path.read_text() == f"==> text 1 <==\n{texts[0]}\n\n==> text 2 <==\n{texts[1]}\n"
    assert quantspec(*command).stdout == path.read_text()


def test_several_prompts_are_one_batch_under_headings_in_their_order(fake: Any, quantspec: Run, document: Path) -> None:
    alone = [quantspec("run", *prompt, "-n", "30").stdout for prompt in (["-p", str(document)], ["--text", "x"])]
    outcome = quantspec("run", "-p", str(document), "--text", "x", "-n", "30")
    assert outcome.stdout == f"==> {document} <==\n{alone[0]}\n==> text <==\n{alone[1]}"
    assert fake.engines[-1]["slots"] == 2
    names = [
        result["prompt"]
        for result in quantspec("run", "--text", "x", "--text", "y", "-n", "3", "--json").json["results"]
    ]
    assert names == ["text 1", "text 2"]


def test_bytes_of_a_name_survive_json(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff\\.txt")
    path.write_text("x")
    outcome = quantspec("run", str(path), "-n", "2", "--json")
    assert outcome.json["results"][0]["prompt"] == f"{tmp_path}/a\\xff\\.txt"


def test_a_prompt_that_fails_ends_no_other(fake: Any, quantspec: Run, document: Path, tmp_path: Path) -> None:
    missing, long = tmp_path / "missing.txt", tmp_path / "long.txt"
    long.write_text("one two three " * 100)
    command = ["run", str(missing), str(document), str(long), "--text", " ", "-n", "9", "-c", "100"]
    alone = quantspec("run", str(document), "-n", "9").stdout
    outcome = quantspec(*command, "-q")
    assert (outcome.code, outcome.stdout) == (4, f"==> {document} <==\n{alone}")
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert [words in line for words, line in zip(("does not exist", "white space", "need"), errors, strict=True)]
    assert fake.engines[-1]["slots"] == 1
    outcome = quantspec(*command, "--json")
    first, answered, beyond, blank = outcome.json["results"]
    assert (outcome.code, answered["stop_reason"], "error" in answered) == (4, "length", False)
    assert [result["error"]["kind"] for result in (first, beyond, blank)] == ["input", "does_not_fit", "input"]
    assert first.keys() == {*answered, "error"}
    assert (first["prompt"], first["prompt_tokens"], first["text"]) == (str(missing), None, "")
    # By default an answer has the tokens that the longest remaining prompt leaves.
    assert len(quantspec(*command[:-4], "-c", "100", "--json").json["results"][1]["tokens"]) > 9
    # Without any prompt left the first error ends the command. A usage error does so in any case.
    quantspec("run", str(missing), str(long), "-n", "9", "-c", "100").assert_error(1, "does not exist")
    quantspec("run", str(long), "--text", " ", "-n", "9", "-c", "100").assert_error(3, f"{long} and its answer need")
    quantspec("run", str(document), "").assert_error(2, "the name of a prompt is empty")


def test_prompts_wait_for_memory_and_for_one_of_32_slots(fake: Any, quantspec: Run) -> None:
    command = ["run", "-n", "16", "--json", *(flag for n in range(40) for flag in ("--text", f"{n} " + "word " * 250))]
    answers = quantspec(*command).json["results"]
    assert fake.engines[-1]["slots"] == 32
    assert len(answers) == 40
    # The toy's memory of a sequence is that of its pages: here two each.
    fake.memory_bytes = 1000 * 5 * 256
    assert quantspec(*command).json["results"] == answers
    assert fake.engines[-1]["pool_tokens"] == 5 * 256


def test_files_come_before_texts(fake: Any, quantspec: Run, document: Path) -> None:
    report = quantspec("run", "--text", "x", "-p", str(document), "--text", "y", "-n", "3", "--json").json
    assert [result["prompt"] for result in report["results"]] == [str(document), "text 1", "text 2"]


def test_a_stop_string_inside_of_a_token(fake: Any, quantspec: Run) -> None:
    fake.answer = ids_of("one two three")
    inner = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for stop in ("wo", "e tw", "e t"):
        (result,) = quantspec("run", "--text", "x", "--stop", stop, "--json").json["results"]
        assert result["text"] == "one two three".partition(stop)[0]
        # The ids before the one that completed the stop string.
        whole = next(n for n in range(99) if stop in inner.decode(fake.answer[:n]))
        assert result["tokens"] == fake.answer[: whole - 1]


def test_a_stop_string_inside_an_accepted_run(fake: Any, quantspec: Run) -> None:
    fake.answer = ids_of("one two three END four five six seven eight")
    fake.accepted = [16]
    report = quantspec(
        "run", "--text", "x", "-n", "99", "--gamma", "16", "--stop", "END", "--stop", "five", "--json"
    ).json
    (result,) = report["results"]
    assert (result["text"], result["stop_reason"]) == ("one two three ", "stop")
    assert result["tokens"] == fake.answer[: len(result["tokens"])]


def test_rates_count_what_was_kept(fake: Any, quantspec: Run) -> None:
    fake.answer = ids_of("one two three END four five six seven eight")
    fake.accepted = [16]
    report = quantspec("run", "--text", "x", "-n", "99", "--gamma", "16", "--stop", "END", "--json").json
    stats, (result,) = report["stats"], report["results"]
    kept = result["new_tokens"] - 1
    assert stats["accepted_tokens"] + stats["rounds"] > kept
    assert stats["decode_tokens_per_s"] * stats["decode_s"] == pytest.approx(kept)


def test_json_as_the_value_of_a_flag_does_not_count(fake: Any, quantspec: Run) -> None:
    quantspec("run", "--text", "--json", "--seed", "-1").assert_error(2, "seed")
    refused = quantspec("run", "--seed", "-1", "--text", "x", "--json")
    assert refused.json["error"]["kind"] == "usage"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("--config --json run --text x", False),
        ("--config nowhere run --json --text x", True),
        ("run --seed -1 --text x -qm --json", False),
        ("run --seed -1 --text x -qm m --json", True),
        ("run --seed -1 --text x -mq --json", True),
        ("run --seed -1 --text x -q --json", True),
        ("run --seed -1 --text x -m --json", False),
        ("run --seed -1 --text x --model=m --json", True),
        ("run --seed -1 --text x -p - --json", True),
        ("run --seed -1 --text x -- --json", False),
    ],
)
def test_an_error_is_a_document_if_json_is_a_flag(fake: Any, quantspec: Run, arguments: str, wanted: bool) -> None:
    outcome = quantspec(*arguments.split())
    assert outcome.code != 0
    assert outcome.stdout.startswith('{"error"') == wanted
    assert wanted or outcome.stdout == ""


def test_an_end_of_text_token_ends_the_text(fake: Any, quantspec: Run) -> None:
    fake.answer = [*ids_of("the end"), 2, *ids_of("never")]
    (result,) = quantspec("run", "--text", "x", "-n", "99", "--json").json["results"]
    assert (result["text"], result["stop_reason"], result["tokens"]) == ("the end", "eos", ids_of("the end"))
    (result,) = quantspec("run", "--text", "x", "-n", "8", "--json", "--ignore-eos").json["results"]
    assert (result["stop_reason"], result["new_tokens"]) == ("length", 8)
    assert "never" in result["text"]


def test_one_new_token_needs_no_round(fake: Any, quantspec: Run) -> None:
    report = quantspec("run", "--text", "x", "-n", "1", "--json").json
    assert (report["results"][0]["new_tokens"], report["stats"]["rounds"]) == (1, 0)


def test_aliases_of_the_peers(fake: Any, quantspec: Run) -> None:
    report = quantspec(
        "run", "--text", "x", "--n-predict", "3", "--temp", "0.7", "--draft-max", "5", "-s", "9", "--json"
    ).json
    assert (report["gamma"], report["seed"], report["accept"]) == (5, 9, "replay")
    assert (
        quantspec("run", "--text", "x", "--max-new-tokens", "3", "--num-draft-tokens", "2", "--spec-type", "kv4").code
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], ["--max-tokens is 0"]),
        (["-n", "-3"], ["-3"]),
        (["-n", "many"], ["many"]),
        (["--gamma", "17"], ["--gamma is 17", "0 to 16"]),
        (["--gamma", "-1"], ["-1"]),
        (["--gamma", "fast"], ["fast"]),
        (["--draft-pages", "1"], ["--draft-pages is 1", "at least 2"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--temperature", "nan"], ["temperature"]),
        (["--temperature", "inf"], ["temperature"]),
        (["--top-p", "0"], ["--top-p is 0"]),
        (["--top-p", "1.5"], ["--top-p is 1.5"]),
        (["--min-p", "2"], ["--min-p is 2"]),
        (["--top-k", "-1"], ["--top-k is -1"]),
        (["--seed", "-1"], ["seed"]),
        (["--seed", str(2**64)], ["seed"]),
        (["--stop", ""], ["stop"]),
        (["--threads", "0"], ["--threads is 0"]),
        (["--device", "gpu"], ["gpu", "cuda"]),
        (["--device", "cuda:x"], ["cuda:x"]),
        (["--device", "cpu:1"], ["cpu:1"]),
        (["--method", "fast"], ["fast"]),
        (["--method", "quantspec+window"], ["'quantspec+window' is not one of", "'quantspec+ngram'"]),
        (["--method", "ar", "--gamma", "4"], ["--gamma is 4, and method ar drafts nothing"]),
        (["--method", "ar", "--draft-pages", "8"], ["--draft-pages is 8, and method ar reads no pages"]),
        (["--method", "ar", "--draft-weights", "int4-mlp"], ["--draft-weights is 'int4-mlp', and method ar"]),
        (["--method", "kv4", "--draft-weights", "int4-mlp"], ["--draft-weights is 'int4-mlp', and method kv4"]),
        (["--method", "ngram", "--draft-weights", "int4-mlp"], ["--draft-weights is 'int4-mlp', and method ngram"]),
        (["--method", "ngram", "--draft-pages", "auto"], ["--draft-pages is 'auto', and method ngram"]),
        (["--method", "ngram", "--page-choice", "window"], ["--page-choice is 'window', and method ngram"]),
        (["--method", "ngram", "--page-choice", "best"], ["--page-choice is 'best', and method ngram"]),
        (
            ["--method", "window", "--page-choice", "best"],
            ["--page-choice is 'best', and method window chooses pages"],
        ),
        (["--method", "snapkv", "--draft-pages", "all"], ["--draft-pages is 'all', and method snapkv chooses pages"]),
        (["--method", "snapkv", "--draft-refresh", "-1"], ["--draft-refresh is -1", "at least 0"]),
        (["--draft-refresh", "4"], ["--draft-refresh is 4, and method quantspec keeps no choice of pages"]),
        (["--method", "window+ngram", "--draft-pages", "all"], ["--draft-pages is 'all', and method window+ngram"]),
        (["--method", "kv4+ngram", "--draft-weights", "int4-mlp"], ["--draft-weights is 'int4-mlp', and method kv4"]),
        (["--kv-target", "int2"], ["int2"]),
        (["-c", "-5"], ["--ctx-size is -5"]),
        (["--nonsense"], ["--nonsense"]),
        (["--revision", "main"], ["--revision"]),
    ],
)
def test_bad_flags_are_usage_errors(fake: Any, quantspec: Run, arguments: list[str], words: list[str]) -> None:
    quantspec("run", "--text", "x", *arguments).assert_error(2, *words)
    assert fake.engines == []


def test_a_value_that_f32_rounds_to_zero_is_zero(fake: Any, quantspec: Run) -> None:
    command = ["run", "--text", "x", "-n", "3", "--json"]
    greedy = quantspec(*command, "--temperature", "1e-60").json
    assert (greedy["accept"], greedy["temperature"]) == ("greedy", 0)
    # The smallest number of 32 bits, and slightly more than half of it.
    for smallest in ("1.4e-45", "8e-46"):
        sampled = quantspec(*command, "--temperature", smallest).json
        assert (sampled["accept"], sampled["temperature"]) == ("replay", float(smallest))
    assert quantspec(*command, "--temperature", "7e-46").json["accept"] == "greedy"
    assert quantspec(*command, "--min-p", "1e-60").code == 0
    quantspec(*command[:-1], "--top-p", "1e-60").assert_error(2, "1e-60")
    assert quantspec(*command, "--temperature", "0.8").json["temperature"] == 0.8


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("run", "--output"),
        ("eval", "--output"),
        ("eval", "--prompt"),
        ("bench", "--output"),
        ("bench", "--prompt"),
        ("bench kernels", "--output"),
    ],
)
def test_a_second_file_is_not_silently_dropped(
    fake: Any, quantspec: Run, tmp_path: Path, document: Path, command: str, flag: str
) -> None:
    other = document if flag == "--prompt" else tmp_path / "out.txt"
    for twice in ([str(document), str(other)], ["-", "-"]):
        arguments = [argument for name in twice for argument in (flag, name)]
        refused = quantspec(*command.split(), *arguments, *(["--text", "x"] if command == "run" else []))
        refused.assert_error(2, f"{flag} is given 2 times", f"give {flag} once")
    assert not (tmp_path / "out.txt").exists()


def test_a_misspelt_flag_or_command_gets_a_suggestion(quantspec: Run) -> None:
    quantspec("run", "--promt", "x").assert_error(2, "--promt", "did you mean --prompt")
    quantspec("rnu").assert_error(2, "rnu", "did you mean run")


def test_a_global_flag_after_the_command_is_a_usage_error(quantspec: Run) -> None:
    for arguments in (["run", "--config", "x"], ["bench", "--config=x"], ["doctor", "--version"]):
        flag = arguments[1].partition("=")[0]
        quantspec(*arguments).assert_error(2, f"'{flag}'", f"{flag} goes before the command; see quantspec --help")
    assert "goes before" not in quantspec("--nonsense").stderr
    assert "goes before" not in quantspec("run", "--nonsense").stderr


@pytest.mark.parametrize("new", [131_072, 10**9, 2**64, 10**40])
def test_a_prompt_beyond_the_context_is_refused_with_numbers(fake: Any, quantspec: Run, new: int) -> None:
    outcome = quantspec("run", "--text", "one two", "-n", str(new))
    outcome.assert_error(3, str(new), "131072", "at most")
    assert fake.engines == []


def test_the_hint_of_a_refusal_fits(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    model = str(copy_demo(tmp_path / "m", max_position_embeddings=64))
    command = ["run", "-m", model, "--text", "one two three " * 10]
    refused = quantspec(*command, "-n", "60")
    refused.assert_error(3, "context is 64")
    advice = re.search(r"at most (\d+) new tokens", refused.stderr)
    assert advice is not None
    assert quantspec(*command, "-n", advice[1]).code == 0
    assert quantspec(*command, "-n", str(int(advice[1]) + 1)).code == 3
    quantspec("run", "-m", model, "--text", "one two three " * 100, "-n", "60").assert_error(
        3, "shorten the prompt to 4"
    )


def test_a_document_beyond_any_context_is_refused_before_it_is_encoded(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("a few words " * 100_000)
    monkeypatch.setattr(tokenizer.Tokenizer, "encode", None)
    quantspec("run", "-p", str(book), "-c", "2000").assert_error(3, f"{book} has 1200000 characters", "2000 tokens")
    long = ("run", "--text", "short", "-c", "2000", "--instruction", "a few words " * 100_000)
    quantspec(*long).assert_error(3, "text and its instructions have 12000", "2000 tokens", "shorten them")


def test_ctx_size_limits_and_is_limited(fake: Any, quantspec: Run) -> None:
    quantspec("run", "--text", "x", "-n", "60", "-c", "50").assert_error(3, "context is 50", "raise the context")
    quantspec("run", "--text", "x", "-c", "200000").assert_error(3, "200000", "131072")
    assert quantspec("run", "--text", "x", "-n", "40", "-c", "50").code == 0


@given(length=st.integers(1, 100), new_tokens=st.integers(1, 100), context=st.integers(1, 64))
def test_every_remedy_of_a_short_context_works(length: int, new_tokens: int, context: int) -> None:
    no_tokenizer: Any = None
    model = Model("demo", DEMO, {"max_positions": 64}, no_tokenizer)

    def hint(length: int, new_tokens: int, context: int) -> str:
        try:
            model.check_fits(Prompt([0] * length), new_tokens, context)
        except DoesNotFitError as error:
            return error.hint
        return ""

    remedies = hint(length, new_tokens, context)
    _, both, changed = remedies.rpartition("raise the context to the model's 64, and ")
    at = 64 if both else context
    shorter = re.search(r"shorten the prompt to (\d+) token", changed)
    assert shorter is None or hint(int(shorter[1]), new_tokens, at) == ""
    fewer = re.search(r"ask for at most (\d+) new token", changed)
    assert fewer is None or hint(length, int(fewer[1]), at) == ""
    larger = "up to the model's 64" in changed
    assert not larger or hint(length, new_tokens, 64) == ""
    assert (remedies == "") == (length + new_tokens <= context)
    if not (shorter or fewer or larger):
        assert remedies in ("", "choose a model with a longer context")
        assert length + new_tokens <= context or min(length, new_tokens) >= 64


def test_an_engine_is_as_large_as_the_longest_sequence(fake: Any, quantspec: Run) -> None:
    report = quantspec("run", "--text", "x", "--text", "one two three four", "-n", "10", "--json").json
    longest = max(result["prompt_tokens"] for result in report["results"])
    assert fake.engines[-1]["capacity"] == longest + 10


def test_an_error_in_json(fake: Any, quantspec: Run) -> None:
    outcome = quantspec("run", "--text", "x", "-n", "0", "--json")
    error = outcome.json["error"]
    assert (error["kind"], error["exit_code"], outcome.code) == ("usage", 2, 2)
    assert outcome.stderr == f"error: {error['message']}\nhint: {error['hint']}\n"
    assert quantspec("run", "--json", "--nonsense").json["error"]["kind"] == "usage"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("does_not_fit", 3),
        ("model", 1),
        ("io", 1),
        ("device", 1),
        ("not_finite", 1),
        ("internal", 1),
        ("usage", 2),
        ("novel", 1),
    ],
)
def test_errors_of_the_engine_keep_their_kind(fake: Any, quantspec: Run, kind: str, code: int) -> None:
    fake.fail = (kind, "something\nis \x1b[31mwrong", "do\tsomething")
    outcome = quantspec("run", "--text", "x", "-n", "9")
    assert outcome.code == code
    assert outcome.stderr == "error: something is \N{REPLACEMENT CHARACTER}[31mwrong\nhint: do something\n"


def test_an_unexpected_exception_is_two_lines(fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import quantspec_cli.run

    monkeypatch.setattr(quantspec_cli.run, "run", lambda *_: 1 / 0)
    quantspec("run", "--text", "x").assert_error(1, "ZeroDivisionError", "defect")


def test_a_full_disk_is_not_blamed_on_standard_output(
    fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quantspec_cli.run

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/part")

    monkeypatch.setattr(quantspec_cli.run, "run", refuse)
    quantspec("run", "--text", "x").assert_error(1, "error: /scratch/part: no space left on device", "free space")
    outcome = quantspec("run", "--text", "x", "--json")
    assert (outcome.code, outcome.json["error"]["kind"]) == (1, "io")


def test_no_memory_is_exit_3(fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import quantspec_cli.prompts

    def refuse(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(quantspec_cli.prompts, "read_all", refuse)
    quantspec("run", "--text", "x").assert_error(3, "out of memory")


def test_a_missing_gpu_is_one_error(fake: Any, quantspec: Run) -> None:
    quantspec("run", "--text", "x", "--device", "cuda:0").assert_error(1, "no CUDA device")


def test_quiet_prints_nothing_but_the_answer(fake: Any, quantspec: Run) -> None:
    assert quantspec("run", "--text", "x", "-n", "5", "-q").stderr == ""
    # Nor a warning or a note.
    loud = ["run", "--text", "x", "-n", "5", "-t", "4096", "--instruction", "Go on."]
    assert "4096 threads" in quantspec(*loud).stderr
    assert quantspec(*loud, "-q").stderr == ""


def test_doctor_reports_machine_folders_and_kernels(fake: Any, quantspec: Run) -> None:
    report = quantspec("doctor", "--json").json
    assert report.keys() >= {"quantspec", "python", "cpu", "gpu", "memory_bytes", "model_cache", "kernels"}
    assert report["cpu"].keys() == {"name", "threads", "simd", "simd_reason", "read_gb_per_s"}
    text = quantspec("doctor").stdout
    for words in (__version__, "a toy has none", "8 GB", "model cache", "tokenizers"):
        assert words in text
    assert "attend, sample for sm_90a, sm_100; attend for ptx compute_80\n" in text


def test_version_and_help(quantspec: Run) -> None:
    assert quantspec("--version").stdout == f"quantspec, version {__version__}\n"
    assert "4 finished with failed documents" in quantspec("--help").stdout
    for command in cli.commands:
        assert quantspec(command, "--help").code == 0
    nothing = quantspec()
    assert (nothing.code, nothing.stdout) == (2, "")
    assert "Commands:" in nothing.stderr


def test_every_option_has_help_and_one_meaning() -> None:
    meanings: dict[str, tuple[Any, ...]] = {}
    for name, command in cli.commands.items():
        assert command.help
        options = [option for option in command.params if isinstance(option, click.Option)]
        for option in options:
            assert option.help, (name, option.name)
            # bench and eval use the flag for a single value, or for llama-bench's short form.
            for flag in option.opts if name in {"run", "doctor", "selftest"} else ():
                meaning = (option.name, option.default, str(option.type))
                assert meanings.setdefault(flag, meaning) == meaning, flag


def test_the_result_is_a_function_of_the_seed(fake: Any, quantspec: Run) -> None:
    def text(*flags: str) -> str:
        result: str = quantspec("run", "--text", "x", "-n", "20", *flags).stdout
        return result

    assert text("--temp", "1", "--seed", "1") == text("--temp", "1", "--seed", "1")
    assert text("--temp", "1", "--seed", "1") != text("--temp", "1", "--seed", "2")
    assert text("--seed", "1") == text("--seed", "2")


def test_json_numbers_are_json(fake: Any, quantspec: Run) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(quantspec("run", "--text", "x", "-n", "5", "--json").stdout, parse_constant=refuse)


def test_the_page_of_the_command_line_names_every_exit_code_and_json_field(fake: Any, quantspec: Run) -> None:
    page = "".join(
        (Path(__file__).parents[1] / "docs" / name).read_text(encoding="utf-8") for name in ("cli.md", "json.md")
    )
    for code in (0, 1, 2, 3, 4, 130, 141):
        assert f"| {code} |" in page
    report = quantspec("run", "--text", "x", "-n", "3", "--json").json
    assert report["stats"].keys() >= Statistics.__annotations__.keys() - {"by_method"}
    for field in Statistics.__annotations__:
        assert f"`{field}`" in page, field
