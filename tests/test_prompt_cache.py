"""`--prompt-cache`: a second question about a document skips its prefill, and no token changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome

from quantspec_cli import Engine, QuantspecError

Run = Callable[..., Outcome]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents. " * 60)
    return path


@pytest.mark.slow
def test_a_second_question_reads_the_question_only(quantspec: Run, document: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    questions = ("Who is there?", "What is the weather like?")
    command = ["run", str(document), "-n", "24", "-t", "2", "--json", "--instruction"]
    plain = [quantspec(*command, question).json for question in questions]
    for repeat in range(2):
        for question, expected in zip(questions, plain, strict=True):
            found = quantspec(*command, question, "--prompt-cache", str(folder)).json
            assert found["results"] == expected["results"]
            length, reused = found["results"][0]["prompt_tokens"], found["stats"]["reused_tokens"]
            assert found["stats"]["prompt_cache_bytes"] == 0, "the folder's, not the engine's"
            if repeat == 0 and question == questions[0]:
                assert reused == 0
            else:
                assert length - 200 < reused < length
    listed = quantspec("cache", "--json", "--prompt-cache", str(folder)).json["prompts"]
    assert (len(listed["files"]), listed["limit_bytes"]) == (len(list(folder.iterdir())), 64 << 30)
    assert listed["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert f"{folder}: " in quantspec("cache", "--prompt-cache", str(folder)).stdout
    # A damaged file is one warning.
    for path in folder.iterdir():
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    outcome = quantspec(*command, questions[0], "--prompt-cache", str(folder))
    assert outcome.json["results"] == plain[0]["results"]
    assert outcome.stderr.count("warning: the cached prompt ") == 1
    assert "removed" in quantspec("cache", "--clear", "--prompt-cache", str(folder)).stdout
    assert not list(folder.iterdir())


def test_the_folder_may_be_in_the_home_directory(
    quantspec: Run, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell expands a variable or a setting."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QUANTSPEC_PROMPT_CACHE", "~/prompts")
    assert quantspec("run", str(document), "-n", "2").code == 0
    (kept,) = (tmp_path / "prompts").iterdir()
    assert [file["path"] for file in quantspec("cache", "--json").json["prompts"]["files"]] == [str(kept)]
    with Engine.load(context=2000, prompt_cache="~/prompts") as engine:
        engine.generate(document.read_text(), max_new_tokens=2)
        assert engine.statistics()["reused_tokens"] > 0


def test_a_batch_of_another_question_processes_only_the_difference(
    quantspec: Run, document: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "prompts")
    command = ["batch", str(document), "-n", "8", "-t", "2", "--json", "--prompt-cache", folder]
    first = quantspec(*command, "--out", str(tmp_path / "a"), "--instruction", "Who is there?").json
    second = quantspec(*command, "--out", str(tmp_path / "b"), "--instruction", "Who was there?").json
    assert first["stats"]["reused_tokens"] == 0
    assert second["stats"]["reused_tokens"] > 500
    plain = quantspec(*command[:-2], "--out", str(tmp_path / "c"), "--instruction", "Who was there?").json
    assert plain["results"][0]["tokens"] == second["results"][0]["tokens"]


@pytest.mark.slow
def test_a_dry_run_knows_what_a_batch_reuses(quantspec: Run, document: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    questions = ("Who is there?", "What is the weather like?", "Who was there?")
    entries = [
        {"id": f"{place}", "text": f"{document.read_text()}\n{text}"}
        for place, text in enumerate((*questions, questions[0]))
    ]
    listed.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = ["batch", str(listed), "--out", str(tmp_path / "out"), "-n", "4", "-t", "2", "--json"]
    planned = quantspec(*command, "--dry-run").json
    assert planned["shared_tokens"] > planned["prompt_tokens"] / 2
    assert quantspec(*command).json["stats"]["reused_tokens"] == planned["shared_tokens"]


def test_a_folder_that_cannot_be_used_is_a_warning(quantspec: Run, document: Path) -> None:
    outcome = quantspec("run", str(document), "-n", "4", "-t", "2", "--prompt-cache", str(document))
    assert outcome.code == 0, outcome
    assert outcome.stderr.count("warning: prompts are not cached: ") == 1
    assert "Traceback" not in outcome.stderr
    for name in ("", "a\0b"):
        assert quantspec("run", str(document), "-n", "4", "--prompt-cache", name).code == 2
    outcome = quantspec("cache", "--prompt-cache", str(document))
    assert outcome.code == 1
    assert "error: cannot read the cache of prompts" in outcome.stderr


@pytest.mark.slow
def test_an_engine_keeps_prompts_in_memory(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = document.read_text()
    with Engine.load(device="cpu", threads=2, context=2048, prompt_cache=False) as engine:
        plain = [engine.generate(text + end, max_new_tokens=16).tokens for end in ("One", "Two", "One")]
        assert (engine.statistics()["reused_tokens"], engine.info["prompt_cache_limit_bytes"]) == (0, None)
    with Engine.load(device="cpu", threads=2, context=2048) as engine:
        assert [engine.generate(text + end, max_new_tokens=16).tokens for end in ("One", "Two", "One")] == plain
        stats = engine.statistics()
        assert stats["reused_tokens"] > 1000
        assert 0 < stats["prompt_cache_bytes"] <= engine.info["prompt_cache_limit_bytes"]
        assert engine.prompt_cache_note() is None
    with Engine.load(device="cpu", threads=2, context=2048, prompt_cache=tmp_path / "prompts") as engine:
        assert engine.generate(text + "One", max_new_tokens=16).tokens == plain[0]
        assert list((tmp_path / "prompts").iterdir())
    monkeypatch.chdir(tmp_path)
    with Engine.load(device="cpu", threads=2, context=2048, prompt_cache="relative") as engine:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        assert engine.generate(text + "One", max_new_tokens=16).tokens == plain[0]
        assert list((tmp_path / "relative").iterdir())
    for wrong in ("", 3, b"folder"):
        with pytest.raises(QuantspecError, match="prompt_cache is"):
            Engine.load(prompt_cache=wrong)  # type: ignore[arg-type]


def test_a_conversation_reads_its_new_turn_only(document: Path) -> None:
    """Earlier turns are a prefix of the next prompt."""
    text = document.read_text()
    with Engine.load(device="cpu", threads=2, context=2048) as engine:
        ids = engine.model.tokenizer.encode(text)
        engine.generate(text, max_new_tokens=16)
        engine.generate(text + " And then?", max_new_tokens=16)
        assert engine.statistics()["reused_tokens"] >= (len(ids) - 1) // 128 * 128 - 128
