"""Plan of a batch: token counts, memory, and `--dry-run`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Outcome, answers

from quantspec_cli import batch_plan, batch_reader, batch_run, documents, sources
from quantspec_cli.batch_work import RunningCall
from quantspec_cli.errors import DoesNotFitError
from quantspec_cli.generation import Generation, Piece
from quantspec_cli.model import Model, Prompt
from quantspec_cli.options import EngineOptions, GenerateOptions
from quantspec_cli.slots import BeyondMemoryError

Run = Callable[..., Outcome]


def test_a_dry_run_predicts_the_speed_of_the_pages_that_are_read() -> None:
    rates: tuple[tuple[str, int | str, float | None], ...] = (
        ("ar", "all", 10.0),
        ("quantspec", "all", 12.0),
        ("window", 16, 14.0),
        ("kv4", "all", None),
        ("quantspec", 16, 15.0),
        ("quantspec", 64, 13.0),
    )
    rows = [{"method": name, "draft_pages": pages, "decode_tokens_per_s": rate} for name, pages, rate in rates]
    for options, expected in (
        ({}, 15),
        ({"gamma": 4}, 12),
        ({"draft_pages": "all"}, 12),
        ({"draft_pages": 16}, 15),
        ({"draft_pages": 8, "gamma": 4}, 15),
        ({"draft_pages": 17}, 13),
        ({"draft_pages": 65}, 12),
        ({"draft_pages": 65, "method": "window"}, 14),
        ({"method": "window"}, 14),
        ({"method": "kv4"}, 10),
        ({"method": "quantspec+ngram"}, 10),
    ):
        assert batch_plan._decode_rate(rows, EngineOptions(**options)) == expected  # type: ignore[arg-type]


def test_a_dry_run_writes_nothing(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (docs / "empty.txt").write_text("")
    command = ["batch", str(docs), "--out", str(out), "-n", "12", "--dry-run"]
    outcome = quantspec(*command, "--json")
    assert outcome.code == 0
    report = outcome.json
    assert not out.exists()
    assert fake.engines == []
    assert (report["documents"], report["to_do"], report["refused"]) == (4, 3, 1)
    assert report["prompt_tokens"] == sum(row["prompt_tokens"] or 0 for row in report["results"])
    longest = max(row["prompt_tokens"] or 0 for row in report["results"])
    assert report["context"] == longest + 12
    assert report["fits"]
    text = quantspec(*command).stdout
    assert "fail    empty.txt is empty" in text
    assert "4 documents: 3 to do, 1 would fail" in text
    # Before a first run, `quantspec plan` predicts the speed, if it knows the device.
    assert (report["predicted_from"], report["predicted_s"] > 0) == ("plan", True)
    assert "predicted as in `quantspec plan`" in text
    fake.capability = "1.0"
    unknown = quantspec(*command, "--json").json
    assert (unknown["predicted_from"], unknown["predicted_s"]) == (None, None)
    assert "no estimate before a first run" in quantspec(*command).stdout

    stats = quantspec(*command[:-1], "--json").json["stats"]
    later = quantspec(*command, "--json").json
    assert (later["to_do"], later["skipped"], later["predicted_s"]) == (0, 3, None)
    assert "no estimate" not in quantspec(*command).stdout
    (docs / "more.txt").write_text("One more.")
    later = quantspec(*command, "--json").json
    assert later["predicted_from"] == "run"
    expected = later["prompt_tokens"] / stats["prefill_tokens_per_s"] + 12 / stats["decode_tokens_per_s"]
    assert later["predicted_s"] == pytest.approx(expected)
    assert "as measured in an earlier run" in quantspec(*command).stdout


def test_a_dry_run_counts_a_common_beginning_once(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    story = "It was a dark and stormy night. " * 60
    questions = [f"{story}\n{question}" for question in ("Who?", "Where was it?", "When?")]
    texts = [*questions, "Another story.", questions[0]]
    listed = tmp_path / "list.jsonl"
    listed.write_text("".join(json.dumps({"id": f"{place}", "text": text}) + "\n" for place, text in enumerate(texts)))
    command = ["batch", str(listed), "--out", str(tmp_path / "out"), "-n", "8", "--dry-run"]
    report = quantspec(*command, "--json").json
    lengths = [row["prompt_tokens"] for row in report["results"]]
    shared = [row["shared_tokens"] for row in report["results"]]
    # Whole blocks of 128 tokens; the last token of a prompt is always computed.
    common = (lengths[2] - 20) // 128 * 128
    assert shared == [0, common, common, 0, (lengths[0] - 1) // 128 * 128]
    assert (report["prompt_tokens"], report["shared_tokens"]) == (sum(lengths), sum(shared))
    assert f"{sum(lengths):,} prompt tokens ({sum(shared):,} as in other documents)" in quantspec(*command).stdout
    stats = quantspec(*command[:-3], "-n", "8", "--json").json["stats"]
    (tmp_path / "out" / "0.md").unlink()
    (tmp_path / "out" / "4.md").unlink()
    later = quantspec(*command, "--json").json
    computed = sum(lengths[place] for place in (0, 4)) - shared[4]
    expected = computed / stats["prefill_tokens_per_s"] + 16 / stats["decode_tokens_per_s"]
    assert later["predicted_s"] == pytest.approx(expected)


def test_a_document_is_extracted_once(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.html").write_text("<p>It was a dark and stormy night.</p>")
    (docs / "long.html").write_text(f"<p>{'word ' * 1000}</p>")
    (docs / "plain.txt").write_text("The rain fell in torrents.")
    extract, extracted = documents.extract, []

    def seen(which: str, name: str, raw: bytes, limit: int) -> Any:
        extracted.append(name)
        return extract(which, name, raw, limit)

    monkeypatch.setattr(documents, "extract", seen)
    command = ["batch", str(docs), "-n", "3", "-c", "600", "--json", "--out"]
    once = quantspec(*command, str(tmp_path / "once")).json
    assert (once["done"], once["failed"]) == (2, 1)
    assert sorted(extracted) == ["a.html", "long.html"]
    # Memory for kept texts is bounded; the others are extracted again.
    extracted.clear()
    monkeypatch.setattr(batch_reader, "KEPT_BYTES", 0)
    quantspec(*command, str(tmp_path / "twice"))
    assert sorted(extracted) == ["a.html", "a.html", "long.html"]
    assert answers(tmp_path / "twice") == answers(tmp_path / "once")
    # A text that is refused makes room for the next one.
    extracted.clear()
    text = "word " * 100_000
    (docs / "0.html").write_text(text)
    monkeypatch.setattr(batch_reader, "KEPT_BYTES", sys.getsizeof(text))
    assert quantspec(*command, str(tmp_path / "third")).json["failed"] == 2
    assert sorted(extracted) == ["0.html", "a.html", "long.html"]


def test_a_default_length_is_that_of_each_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    """Without -n an answer has what its document leaves of the context, as with `run` on it alone."""
    (docs / "long.txt").write_text("word " * 80)
    out = tmp_path / "out"
    command = ["batch", str(docs), "--out", str(out), "-c", "100", "--json"]
    results = {result["document"]: result for result in quantspec(*command).json["results"]}
    assert all(result["prompt_tokens"] + result["new_tokens"] == 100 for result in results.values())
    for name in ("a.txt", "long.txt"):
        (alone,) = quantspec("run", str(docs / name), "-c", "100", "--json").json["results"]
        assert alone["tokens"] == results[name]["tokens"]
    # Such an answer depends on the context.
    assert quantspec(*command).json["skipped"] == 4
    said = quantspec(*command[:-1], "--no-resume", "--ignore-eos").stderr
    assert '4 answers were cut at the end of the context: stop_reason "length"' in said
    assert quantspec(*command, "-c", "101").json["done"] == 4


def test_memory_of_workers_is_no_failure_of_a_document() -> None:
    """A prompt beyond the memory of a Ray cluster is refused as such, so that a later run tries it again."""
    arguments: Any = SimpleNamespace(
        dry_run=False, long="refuse", instruction=None, system_prompt=None, template_args={}, context_from=""
    )
    reader = batch_reader.Reader(Model.open(), arguments, GenerateOptions(max_new_tokens=8), 131_072)
    reader.limit(4096, 50_000)
    with pytest.raises(BeyondMemoryError, match="4096 fit into memory"):
        reader.check(reader.prompt("a", "word " * 30_000))


def test_a_thinking_block_is_progress() -> None:
    call, seen = RunningCall(5), []
    text = SimpleNamespace(tokens=[])

    class Thinking:
        texts = (text,)

        def __iter__(self) -> Iterator[Piece]:
            for token in range(3):
                text.tokens.append(token)
                yield Piece(0, "", token == 2)
                seen.append((call.stage, call.done))

        def interrupt(self) -> None:
            pass

        def generations(self) -> list[Generation]:
            return [Generation(5, text.tokens, "", "eos", "thoughts")]

    engine: Any = SimpleNamespace(start=lambda *_, **__: Thinking())
    call.decode(engine, Prompt([1] * 5), GenerateOptions())
    assert seen == [("decoding", 1), ("decoding", 2), ("decoding", 3)]


def test_a_default_length_may_be_named(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "--json"]
    assert quantspec(*command).json["done"] == 3
    assert quantspec(*command, "-n", "256").json["skipped"] == 3


def test_a_dry_run_counts_the_parts_that_memory_allows(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    fake.memory_bytes = 600 * 1000
    (docs / "long.txt").write_text("word. " * 1000)
    command = ["batch", str(docs / "long.txt"), "--out", str(tmp_path / "out"), "-n", "20", "--json"]
    command += ["--long", "map-reduce", "--instruction", "Sum up."]
    planned = quantspec(*command, "--dry-run").json["results"][0]["new_tokens"]
    calls = quantspec(*command).json["results"][0]["calls"]
    assert calls > 3
    assert abs(planned - 20 * calls) <= 20


def test_parts_have_most_of_the_context_by_default(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (docs / "long.txt").write_text("word. " * 400)
    command = ["batch", str(docs / "a.txt"), str(docs / "long.txt"), "--out", str(tmp_path / "out"), "-c", "200"]
    command += ["--instruction", "Sum up.", "--long", "map-reduce", "--json"]
    report = quantspec(*command).json
    whole, split = report["results"]
    assert (whole["calls"], whole["prompt_tokens"] + whole["new_tokens"]) == (1, 200)
    # 800 tokens in parts of about 150, and partial answers of nearly 50.
    assert split["status"] == "done"
    (part,) = {part["new_tokens"] for part in split["tree"]["parts"]}
    assert 40 < part < 50
    # The last answer has what its prompt leaves.
    assert split["prompt_tokens"] + split["new_tokens"] == 200
    planned = quantspec(*command, "--no-resume", "--dry-run").json["results"][1]
    assert abs(planned["new_tokens"] - part * split["calls"]) <= 50, planned


def test_partial_answers_fit_with_a_long_instruction(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (docs / "long.txt").write_text("word. " * 400)
    command = ["batch", str(docs / "long.txt"), "--out", str(tmp_path / "out"), "-c", "200", "--json"]
    command += ["--instruction", "sum up " * 30, "--long", "map-reduce", "--ignore-eos"]
    (result,) = quantspec(*command).json["results"]
    assert result["status"] == "done", result["error"]
    assert max(part["new_tokens"] for part in result["tree"]["parts"]) < 50
    assert result["prompt_tokens"] + result["new_tokens"] == 200


def test_memory_that_shrinks_before_the_engine_opens(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_engine = batch_run.Engine

    def shrinking(*arguments: Any, **options: Any) -> Any:
        opened.append(options["pool"])
        if len(opened) <= failures:
            fake.memory_bytes = options["pool"] * 900
            raise DoesNotFitError("memory was taken", "free some")
        return open_engine(*arguments, **options)

    monkeypatch.setattr(batch_run, "Engine", shrinking)
    failures, fake.memory_bytes = 1, 10**6
    (docs / "long.txt").write_text("word " * 500)
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "12", "--json"]
    assert quantspec(*command).json["done"] == 4
    assert opened[1] < opened[0]
    failures = 99
    opened.clear()
    quantspec(*command[:-1], "--no-resume").assert_error(3, "memory was taken")
    assert len(opened) == 3


def test_memory_bounds_the_context_and_the_number_at_once(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path
) -> None:
    (docs / "long.txt").write_text("word " * 1000)
    fake.memory_bytes = 600 * 1000
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "12", "--json"]
    outcome = quantspec(*command)
    assert outcome.code == 4
    (failed,) = [result for result in outcome.json["results"] if result["status"] == "failed"]
    assert failed["document"] == "long.txt"
    assert "600 fit into memory" in failed["error"]["message"]
    # The engine has room for the longest of the others.
    longest = max(result["prompt_tokens"] for result in outcome.json["results"] if result["status"] == "done") + 12
    assert (fake.engines[-1]["capacity"], fake.engines[-1]["slots"]) == (longest, 3)
    # With this document alone, nothing is loaded.
    loads = len(fake.engines)
    assert quantspec(*command).json["results"][-1]["error"] == failed["error"]
    assert len(fake.engines) == loads
    # The remedy named by the error suffices.
    fake.memory_bytes = 10**12
    assert quantspec(*command).json["done"] == 1


def test_documents_share_the_memory_of_the_longest(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    """With the longest context for each, only two would fit."""
    folder, out = tmp_path / "docs", tmp_path / "out"
    folder.mkdir()
    for number, words_ in enumerate((700, 100, 120, 140)):
        (folder / f"{number}.txt").write_text("word " * words_)
    command = ["batch", str(folder), "--out", str(out), "-n", "16", "--json"]
    longest = quantspec(*command, "--dry-run").json["context"]
    fake.memory_bytes = 2 * 1000 * longest
    planned = quantspec(*command, "--dry-run").json
    assert (planned["context"], planned["parallel"], planned["fits"]) == (longest, 4, True)
    assert planned["pool"] <= 2 * longest
    engines = len(fake.engines)
    report = quantspec(*command).json
    assert (report["done"], report["failed"]) == (4, 0)
    (engine,) = fake.engines[engines:]
    assert (engine["slots"], engine["pool_tokens"]) == (4, planned["pool"])
    # The longest document fills the pool: the others wait, then decode together.
    fake.memory_bytes, fake.round_s = 1000 * (longest + 128), 0.02
    again = quantspec(*command, "--no-resume").json
    tokens = [{line["document"]: line["tokens"] for line in found["results"]} for found in (report, again)]
    assert tokens[0] == tokens[1]
    assert again["done"] == 4


def test_memory_decides_how_many_decode_together(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text("word " * (100 + 10 * number))
    command = ["batch", str(folder), "--out", str(tmp_path / "out"), "-n", "16", "--dry-run", "--json"]
    assert quantspec(*command).json["parallel"] == 16
    fake.device = "cuda:0"
    assert quantspec(*command).json["parallel"] == 32
    assert quantspec(*command, "--parallel", "7").json["parallel"] == 7
    # Memory of the toy's slots is their pages alone: as many wait for pages as do not fit.
    tokens = quantspec(*command).json["prompt_tokens"]
    fake.memory_bytes = 1000 * 20 * (tokens // 40)
    tight = quantspec(*command).json
    assert 18 * (tokens // 40) < tight["pool"] <= 20 * (tokens // 40)
    assert tight["fits"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["It was a dark and stormy night. ", "a", "\n"])
def test_a_huge_document_fails_at_once_in_little_memory(
    toy_command: list[str], docs: Path, tmp_path: Path, text: str
) -> None:
    """100 MB: prose, one word, and white space, which a check of the stripped text would miss."""
    with (docs / "huge.txt").open("w") as file:
        file.write((text * 1_000_000)[:1_000_000] * 99 + "x" * 1_000_000)
    program = toy_command[-1].removesuffix("main()") + (
        "import resource\n"
        "try:\n    main()\n"
        "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "-q", "--json"]
    done = subprocess.run([*toy_command[:-1], program, *command], capture_output=True, timeout=60, check=False)
    (failed,) = [result for result in json.loads(done.stdout)["results"] if result["status"] == "failed"]
    assert done.returncode == 4
    assert failed["error"]["message"] == (
        "huge.txt has 100000000 characters and more than 131072 tokens; the context is 131072"
    )
    assert failed["sha256"] is not None
    assert int(done.stderr.splitlines()[-1]) < 1_000_000, "kB; encoding takes 10 GB"


def test_groups_of_documents_are_counted_as_each_alone(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "empty.txt").write_text("")
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--dry-run", "--json"]
    together = quantspec(*command).json["results"]
    monkeypatch.setattr(batch_reader, "GROUP_CHARACTERS", 0)
    assert quantspec(*command).json["results"] == together
    assert [row["document"] for row in together] == ["a.txt", "b.md", "deep/er/c.txt", "empty.txt"]
    assert [row["error"] is None for row in together] == [True, True, True, False]


def test_a_dry_run_reads_a_folder_that_cannot_be_written(obedient: Run, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert obedient("batch", str(docs), "--out", str(out), "-n", "3").code == 0
    for folder in (out / sources.STATE, out):
        folder.chmod(0o555)
    outcome = obedient("batch", str(docs), "--out", str(out), "-n", "3", "--dry-run", "--json")
    for folder in (out, out / sources.STATE):
        folder.chmod(0o755)
    assert (outcome.code, outcome.json["skipped"]) == (0, 3)
