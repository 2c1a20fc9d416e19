"""Flags over variables over the settings file over defaults."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import DEMO, Outcome
from tokenizers import Tokenizer

Run = Callable[..., Outcome]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("QUANTSPEC_CONFIG", str(path))
    return path


def gamma_used(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome
    return outcome.json["gamma"]


def test_a_flag_beats_a_variable_and_a_variable_beats_the_file(
    fake: type, quantspec: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "--text", "x", "-n", "2", "--json"]
    file.write_text("")
    assert gamma_used(quantspec(*command)) == "auto"
    file.write_text("gamma = 3\n")
    assert gamma_used(quantspec(*command)) == 3
    file.write_text("gamma = 3\n[run]\ngamma = 5\n")
    assert gamma_used(quantspec(*command)) == 5
    monkeypatch.setenv("QUANTSPEC_GAMMA", "7")
    assert gamma_used(quantspec(*command)) == 7
    assert gamma_used(quantspec(*command, "--gamma", "2")) == 2


def test_flags_that_differ_between_commands_are_not_shared(
    fake: type, quantspec: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTSPEC_DRAFT_PAGES", "all")
    monkeypatch.setenv("QUANTSPEC_BATCH", "1,4")
    file.write_text('draft-pages = "auto"\nbatch = "1,4"\n')
    quantspec("eval", "-p", "nosuch").assert_error(1, "nosuch does not exist")
    assert quantspec("plan", "--json").json["batch"] == 1
    file.write_text('[eval]\ndraft-pages = "many"\n[plan]\nbatch = 2\n')
    quantspec("eval", "-p", "nosuch").assert_error(2, "--draft-pages has 'many'", f"eval.draft-pages in {file}")
    assert quantspec("plan", "--json").json["batch"] == 2


def test_a_refused_value_names_its_source(
    fake: type, quantspec: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "--text", "x"]
    see = "see quantspec run --help"
    file.write_text('gamma = "many"\n')
    assert quantspec(*command).stderr.endswith(f"\nhint: it is from gamma in {file}; {see}\n")
    file.write_text('gamma = 3\n[run]\ngamma = "many"\n')
    assert quantspec(*command).stderr.endswith(f"\nhint: it is from run.gamma in {file}; {see}\n")
    monkeypatch.setenv("QUANTSPEC_GAMMA", "lots")
    refused = quantspec(*command)
    assert refused.code == 2
    assert "'lots' is neither a whole number nor 'auto'" in refused.stderr
    assert refused.stderr.endswith(f"\nhint: it is from QUANTSPEC_GAMMA; {see}\n")
    assert quantspec(*command, "--gamma", "some").stderr.endswith(f"\nhint: {see}\n")


@pytest.mark.parametrize(
    ("command", "key", "value", "refused"),
    [
        ("run", "gamma", 17, "--gamma is 17"),
        ("run", "draft-pages", 1, "--draft-pages is 1"),
        ("run", "max-tokens", 0, "--max-tokens is 0"),
        ("run", "temperature", -1.0, "--temperature is -1.0"),
        ("run", "device", "gpu", "--device is 'gpu'"),
        ("run", "threads", 0, "--threads is 0"),
        ("run", "stop", "", "a stop string is empty"),
        ("run", "ctx-size", -1, "--ctx-size is -1"),
        ("run", "ctx-size", 10**7, "a context of 10000000 tokens exceeds the model's 131072"),
        ("run", "model", "./nowhere", "model directory ./nowhere does not exist"),
        ("run", "model", "", "the name of the model is empty"),
        ("run", "revision", "main", "--revision without --model"),
        ("eval", "tokens", 1, "--tokens is 1"),
        ("bench", "n-depth", "1-", "-d has '1-'"),
        ("bench", "draft-pages", "1", "--draft-pages has '1'"),
        ("bench", "repetitions", 0, "--repetitions is 0"),
        ("selftest", "threads", 0, "--threads is 0"),
    ],
)
def test_an_error_names_the_flag_and_where_its_value_is_from(
    fake: type,
    quantspec: Run,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    key: str,
    value: Any,
    refused: str,
) -> None:
    flag, variable = f"--{key}", f"QUANTSPEC_{key.replace('-', '_').upper()}"
    text = ["--text", "x"] if command == "run" else []
    file.write_text(f"[{command}]\n{key} = {value!r}\n")
    said = quantspec(command, *text).stderr
    assert said.startswith(f"error: {refused}\nhint: it is from {command}.{key} in {file}; "), said
    hint = said.partition("; ")[2]
    if value != "":  # an empty variable counts as unset
        monkeypatch.setenv(variable, str(value))
        assert quantspec(command, *text).stderr == f"error: {refused}\nhint: it is from {variable}; {hint}"
    assert quantspec(command, *text, flag, str(value)).stderr == f"error: {refused}\nhint: {hint}"


def test_what_has_no_effect_is_left_out_unless_a_flag_gives_it(
    fake: Any, quantspec: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        'gamma = 4\ndraft-model = "nowhere"\ndraft-model-kv = "int8"\ndraft-refresh = 3\npage-choice = "window"\n'
        'draft-precision = "down"\n[run]\ndraft-pages = 8\n[batch]\ndraft-pages = 8\n'
    )
    plain = ("run", "--text", "x", "-n", "2")
    run = (*plain, "--json")
    for method, gamma in (("ar", 0), ("ngram", 4)):
        found = quantspec(*run, "--method", method)
        assert (found.code, found.stderr, found.json["gamma"]) == (0, "", gamma), found
        assert "draft_model" not in found.json
    # The default method reads pages and draft weights.
    assert quantspec(*run).code == 0
    used = {name: fake.engines[-1][name] for name in ("draft_pages", "page_choice", "draft_precision", "draft_refresh")}
    assert used == {"draft_pages": 8, "page_choice": "window", "draft_precision": "down", "draft_refresh": 0}
    (tmp_path / "a.txt").write_text("one")
    batch = ("batch", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "-n", "2", "--method", "ar")
    assert quantspec(*batch).code == 0
    quantspec("eval", "-p", "nosuch").assert_error(1, "nosuch does not exist")
    quantspec("bench", "--methods", "ar", "--prompt", "nosuch").assert_error(1, "nosuch does not exist")
    monkeypatch.setenv("QUANTSPEC_GAMMA", "3")
    assert gamma_used(quantspec(*run, "--method", "ar")) == 0
    assert gamma_used(quantspec(*run)) == 3
    quantspec(*plain, "--method", "ar", "--gamma", "4").assert_error(2, "--gamma is 4, and method ar drafts nothing")
    file.write_text('method = "ar"\n')
    quantspec(*plain, "--gamma", "4").assert_error(2, "--gamma is 4, and method ar drafts nothing")
    monkeypatch.setenv("QUANTSPEC_GAMMA", "17")
    quantspec(*plain).assert_error(2, "--gamma is 17", "it is from QUANTSPEC_GAMMA")


def test_the_file_may_hold_numbers_texts_flags_and_lists(fake: type, quantspec: Run, file: Path) -> None:
    file.write_text(
        '[run]\nmax-tokens = 4\ntemperature = 0.5\nstop = ["END", "\\n\\n"]\n'
        'method = "kv4"\ndraft-pages = "all"\nquiet = true\n'
    )
    outcome = quantspec("run", "--text", "x")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert fake.engines[0]["method"] == "kv4"  # type: ignore[attr-defined]
    # A single value of a repeatable flag need not be a list.
    file.write_text('max-tokens = 4\nstop = "END"\n')
    assert quantspec("run", "--text", "x").code == 0
    assert quantspec("run", "--text", "x", "--json").json["results"][0]["new_tokens"] == 4


def test_the_default_file_is_in_xdg_config_home(
    fake: type, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUANTSPEC_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    command = ["run", "--text", "x", "-n", "2", "--json"]
    assert gamma_used(quantspec(*command)) == "auto"
    (tmp_path / "quantspec").mkdir()
    (tmp_path / "quantspec" / "config.toml").write_text("gamma = 6")
    assert gamma_used(quantspec(*command)) == 6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("gama = 3", "gama is no setting"),
        ("[run]\nfoo = 3", "run.foo is no setting"),
        ("[rnu]\ngamma = 3", "rnu is no setting"),
        ('prompt = "x"', "prompt is no setting"),
        ("gamma = ", "not valid TOML"),
        ("\udce9".encode("utf-8", "surrogateescape").decode("latin-1"), "not valid TOML"),
        ("gamma = [1]", "gamma is [1]"),
        ("[run]\nmax-tokens = true", "run.max-tokens is True"),
        ("max-tokens = 2026-11-21", "max-tokens is datetime.date"),
        ("[run]\nquiet = 'yes'", "true or false"),
        ("stop = [['x']]", "stop is ['x']"),
        ('stop = ["", 1]', "stop is 1"),
        ("stop = 2.5", "stop is 2.5"),
        ("stop = [0x" + "f" * 5000 + "]", "stop is a number of 20000 bits"),
        ("gamma = [0x" + "f" * 5000 + "]", "gamma is a list that cannot be printed"),
        ("stop = [true]", "stop is True"),
        ('method = "fast"', "'fast' is not one of"),
        ("max-tokens = 2.9", "max-tokens is 2.9"),
        ("[run]\nseed = 1.0", "run.seed is 1.0"),
        ("max-tokens = inf", "max-tokens is inf"),
        ("ctx-size = 1e400", "ctx-size is inf"),
        ("gamma = 2.5", "2.5 is neither a whole number"),
        ("temperature = 1" + "0" * 400, "temperature is a number of 1329 bits"),
        ("max-tokens = 0x" + "f" * 5000, "max-tokens is a number of 20000 bits"),
        ('[bench]\nwhat = "kernels"', "bench.what is no setting"),
        ("[cache]\nclear = true", "cache.clear is no setting"),
        ("[doctor]\njson = true", "hint: remove it"),
        ("max_tokens = 3\nmax-tokens = 4", "max_tokens and max-tokens are one setting"),
        ("[run]\nctx-size = 3\nctx_size = 3", "run.ctx-size and run.ctx_size are one setting"),
    ],
)
def test_a_mistake_in_the_file_is_one_usage_error(
    fake: type, quantspec: Run, file: Path, content: str, words: str
) -> None:
    file.write_text(content)
    quantspec("run", "--text", "x").assert_error(2, words)


def test_a_file_that_is_named_must_exist(fake: type, quantspec: Run, file: Path) -> None:
    quantspec("run", "--text", "x").assert_error(1, str(file), "cannot be read")
    quantspec("--config", str(file), "run", "--text", "x").assert_error(1, str(file), "cannot be read")


def test_a_file_without_permission_is_one_error(obedient: Run, file: Path) -> None:
    file.touch(mode=0)
    for config in ([], ["--config", str(file)]):
        outcome = obedient(*config, "run", "--text", "x", "--json")
        assert (outcome.code, outcome.json["error"]["kind"]) == (1, "io")
        assert outcome.json["error"]["message"] == f"settings file {file} cannot be read: permission denied"
        outcome = obedient(*config, "run", "--help")
        assert (outcome.code, outcome.stderr) == (0, "")
        assert outcome.stdout.startswith("Usage: ")


@pytest.mark.parametrize("name", ["", ".", "nowhere", "x" * 5000])
def test_an_invalid_settings_path_is_an_error(fake: type, quantspec: Run, name: str) -> None:
    refused = quantspec("--config", name, "run", "--text", "x")
    refused.assert_error(1 if name else 2, "settings file")
    assert name or "empty" in refused.stderr
    assert quantspec("--config", name, "run", "--help").stdout.startswith("Usage: ")


def test_help_needs_no_settings(quantspec: Run, file: Path) -> None:
    for content in (None, "gama = 3"):
        if content is not None:
            file.write_text(content)
        for command in (["run"], ["bench"], []):
            outcome = quantspec(*command, "--help")
            assert (outcome.code, outcome.stderr) == (0, "")
            assert "Usage: quantspec" in outcome.stdout


@pytest.mark.parametrize("place", ["~nouser", "~", "x" * 5000, "/" + "x" * 5000])
def test_an_impossible_path_has_no_settings(
    fake: type, quantspec: Run, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    # A user unknown to the system, as in containers.
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("QUANTSPEC_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", place)
    assert quantspec("run", "--text", "x", "-n", "2").code == 0


def test_a_prompt_beyond_the_context_names_its_source(
    fake: Any, quantspec: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second has so many characters that it is not encoded.
    for name, text in (("long", "word " * 500), ("longer", "word " * 50_000), ("short", "word")):
        (tmp_path / f"{name}.txt").write_text(text)
    names = [str(tmp_path / f"{name}.txt") for name in ("long", "longer", "short")]
    run, batch = ("run", *names, "-n", "2"), ("batch", *names, "--out", str(tmp_path / "out"), "-n", "2", "--dry-run")

    def hints(*flags: str) -> list[str]:
        found = [result["error"]["hint"] for result in quantspec(*run, *flags, "--json").json["results"][:2]]
        found += [result["error"]["hint"] for result in quantspec(*batch, *flags, "--json").json["results"][:2]]
        return found

    file.write_text("")
    plain = hints("-c", "300")
    file.write_text("[run]\nctx-size = 300\n[batch]\nctx-size = 300\n")
    keys = ["run.ctx-size"] * 2 + ["batch.ctx-size"] * 2
    assert hints() == [f"the context is from {key} in {file}; {hint}" for key, hint in zip(keys, plain, strict=True)]
    monkeypatch.setenv("QUANTSPEC_CTX_SIZE", "300")
    assert hints() == [f"the context is from QUANTSPEC_CTX_SIZE; {hint}" for hint in plain]
    assert hints("-c", "300") == plain
    # Not where the model's own context is too short.
    monkeypatch.setenv("QUANTSPEC_CTX_SIZE", "0")
    quantspec("run", "--text", "x", "-n", "1000000").assert_error(3, "hint: ask for at most ")


def test_a_variable_holds_one_stop_string(fake: Any, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one horse, two horses, then two zebras and more"
    inner = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    fake.answer = inner.encode(text, add_special_tokens=False).ids
    monkeypatch.setenv("QUANTSPEC_STOP", "two zebras")
    (result,) = quantspec("run", "--text", "x", "--json").json["results"]
    assert (result["text"], result["stop_reason"]) == ("one horse, two horses, then ", "stop")


def test_a_bad_variable_is_one_usage_error(fake: type, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTSPEC_TEMPERATURE", "hot")
    quantspec("run", "--text", "x").assert_error(2, "hot", "temperature")


def test_inputs_and_outputs_are_not_variables(fake: type, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROMPT", "TEXT", "OUTPUT", "JSON", "AS_JSON"):
        monkeypatch.setenv(f"QUANTSPEC_{name}", "x")
    quantspec("run").assert_error(2, "no prompt")


def test_the_settings_file_is_no_output(fake: type, quantspec: Run, file: Path, docs: Path, tmp_path: Path) -> None:
    file.write_text("max-tokens = 3\n")
    words = f"{file} is the settings file"
    quantspec("run", "--text", "A", "-o", str(file)).assert_error(2, "--output", words)
    quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "--report", str(file)).assert_error(2, words)
    assert file.read_text() == "max-tokens = 3\n"


def test_shells_complete_names_of_files() -> None:
    from quantspec_cli.cli import cli

    def kind(command: str, name: str) -> str:
        (parameter,) = [parameter for parameter in cli.commands[command].params if parameter.name == name]
        return parameter.shell_complete(click.Context(cli), "a")[0].type

    for command, name in (("run", "documents"), ("run", "output"), ("batch", "paths"), ("batch", "json_schema")):
        assert kind(command, name) == "file"
