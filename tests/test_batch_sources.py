"""Which documents a directory, a file, a glob or a list names, and the places of their answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, answers
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli import sources
from quantspec_cli.errors import InputError, UsageError

Run = Callable[..., Outcome]


def test_globs_files_and_lists_name_their_answers(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    def found(*arguments: str) -> list[str]:
        out = tmp_path / f"out{time.monotonic_ns()}"
        outcome = quantspec("batch", *arguments, "--out", str(out), "-n", "3", "--json")
        assert outcome.code == 0, outcome
        return sorted(answers(out))

    assert found(str(docs / "**" / "*.txt")) == ["a.txt.md", "deep/er/c.txt.md"]
    assert found(str(docs / "a.txt"), str(docs / "deep")) == ["a.txt.md", "er/c.txt.md"]
    assert found(str(docs / "a.txt"), str(docs / "a.txt")) == ["a.txt.md"]
    listed = tmp_path / "list.jsonl"
    rows = [{"path": "docs/a.txt"}, {"path": str(docs / "b.md")}, {"id": "x/y", "text": "A literal."}]
    listed.write_text("\n".join(map(json.dumps, [*rows, {"id": "z", "path": "docs/a.txt"}])) + "\n\n")
    absolute = str(docs / "b.md").lstrip("/") + ".md"
    expected = sorted(["docs/a.txt.md", absolute, "x/y.md", "z.md"])
    assert found(str(listed)) == expected
    assert found(str(listed.rename(tmp_path / "LIST.JSONL"))) == expected


def test_a_text_of_a_list_is_taken_as_it_is(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    """Neither its id nor its first characters make it a document of another kind."""
    texts = {
        "contract.html": "If a < b and c > d then\nparagraph one.\n\nUse <name> here & there.",
        "q1": "%PDF-1.7 is the first line of a PDF file.",
        "q2.docx": "PK\x03\x04 begins a zip archive.",
        "q3": "{\\rtf begins an RTF document.",
        "q4": "\ufeffA byte order mark.",
    }
    listed = tmp_path / "list.jsonl"
    listed.write_text("\n".join(json.dumps({"id": name, "text": text}) for name, text in texts.items()))
    command = ["batch", str(listed), "--out", str(tmp_path / "out"), "-n", "3", "--json"]
    planned = quantspec(*command, "--dry-run").json["results"]
    done = quantspec(*command).json["results"]
    alone = quantspec("run", *(f"--text={text}" for text in texts.values()), "-n", "3", "--json").json["results"]
    for name, expected in zip(texts, alone, strict=True):
        (row,) = [row for row in planned if row["document"] == name]
        (found,) = [result for result in done if result["document"] == name]
        assert found["tokens"] == expected["tokens"]
        assert row["prompt_tokens"] == found["prompt_tokens"] == expected["prompt_tokens"]


def test_a_directory_in_a_list_is_no_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    listed.write_text(json.dumps({"path": "docs"}))
    outcome = quantspec("batch", str(listed), "--out", str(tmp_path / "out"), "-n", "3", "--json")
    (result,) = outcome.json["results"]
    assert (outcome.code, result["error"]["message"]) == (4, "docs is a directory")
    assert "as files" in result["error"]["hint"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 of"),
        ("[1]", "no object"),
        ('{"path": 5}', "'path' in line 1"),
        ('{"path": ""}', "not empty"),
        ('{"id": null, "text": "y"}', "is null"),
        ('{"text": "x"}', "no id"),
        ('{"id": "x"}', "neither path nor text"),
        ('{"path": "x", "text": "y", "id": "z"}', "both path and text"),
        ('{"path": "x", "prompt": "y"}', "unknown field 'prompt'"),
        ('{"path": "../x"}', "leaves the output folder"),
        ('{"id": "a/../../x", "text": "y"}', "leaves the output folder"),
        ('{"id": "/", "text": "y"}', "cannot be that of an answer"),
        ('{"id": ".quantspec/journal.sqlite", "text": "y"}', "cannot be that of an answer"),
        ('{"id": "a\\u0000b", "text": "y"}', "'id' in line 1"),
        ('{"id": "\\ud800", "text": "y"}', "half of a pair"),
        ('{"id": "x", "text": "\\udc80"}', "hint: correct \\udc80, half of a surrogate pair"),
    ],
)
def test_a_malformed_line_of_a_list_is_one_error(
    fake: Any, quantspec: Run, tmp_path: Path, line: str, words: str
) -> None:
    listed = tmp_path / "list.jsonl"
    listed.write_text(line)
    quantspec("batch", str(listed), "--out", str(tmp_path / "out")).assert_error(1, words)
    assert not (tmp_path / "out").exists()


def test_answers_that_the_shell_names_are_not_documents(fake: Any, quantspec: Run, docs: Path) -> None:
    """`batch docs/* --out docs`, which the shell expands."""

    def batch(*flags: str) -> Any:
        files = sorted(str(path) for path in docs.iterdir() if path.is_file())
        return quantspec("batch", *files, "--out", str(docs), "-n", "3", *flags)

    assert batch("--json").json["done"] == 2
    for _ in range(2):
        again = batch()
        assert again.code == 0
        assert f"left out, as they are answers in {docs}: 2" in again.stderr
        assert "2 done before" in again.stderr
    assert sorted(path.name for path in docs.glob("*.md")) == ["a.txt.md", "b.md", "b.md.md"]
    answer = str(docs / "a.txt.md")
    quantspec("batch", answer, "--out", str(docs), "-n", "3").assert_error(
        2, "all documents are answers", "quote a glob"
    )


def test_answers_inside_the_documents_folder_are_not_documents(fake: Any, quantspec: Run, docs: Path) -> None:
    command = ["batch", str(docs), "--out", str(docs / "answers"), "-n", "3", "--json"]
    assert quantspec(*command).json["documents"] == 3
    assert quantspec(*command).json["documents"] == 3
    pattern = ["batch", str(docs / "**" / "*"), *command[2:]]
    assert quantspec(*pattern).json["documents"] == 3


def test_answers_of_another_batch_are_not_documents(fake: Any, quantspec: Run, docs: Path) -> None:
    for folder, flags in (("summaries", ()), ("parties", ()), ("summaries", ("--no-resume",))):
        command = ["batch", str(docs), "--out", str(docs / folder), "-n", "3", "--json", *flags]
        assert quantspec(*command).json["done"] == 3
    glob = ["batch", str(docs / "**/*"), "--out", str(docs.parent / "elsewhere"), "-n", "3", "--json"]
    assert quantspec(*glob).json["done"] == 3


@pytest.mark.parametrize("out", ["out", "deep/out"])
def test_a_glob_enters_no_output_folder(docs: Path, tmp_path: Path, out: str) -> None:
    (docs / out / ".quantspec").mkdir(parents=True)
    (docs / out / "inner").mkdir()
    (docs / out / ".quantspec" / "journal.sqlite").touch()
    for answer in ("a.txt.md", "inner/c.txt.md"):
        (docs / out / answer).write_text("An answer.")

    def found(pattern: str) -> list[str]:
        try:
            return [source.name for source in sources.find([str(docs / pattern)], tmp_path / "elsewhere")]
        except InputError:
            return []

    for pattern in (
        "**",
        "*/*",
        "*/*/*",
        "*/*/*/*",
        "**/out/*",
        "**/inner/*",
        "*/**",
        "*/**/*",
        "*/out/**",
        "d*/o*/*/*",
    ):
        assert [name for name in found(pattern) if name.endswith("txt.md")] == [], pattern
        for file in ("r.html", "inner/r.html"):
            assert not sources.would_find(str(docs / pattern), str(docs / out / file), tmp_path / "elsewhere"), pattern
    assert not sources.would_find(str(docs), str(docs / out / "r.html"), tmp_path / "elsewhere")
    assert found("*/er/*") == ["deep/er/c.txt"]
    # A folder that is named without a wildcard is meant.
    assert found(f"{out}/*") == ["a.txt.md"]
    assert found(f"{out}/**") == ["a.txt.md", "inner/c.txt.md"]
    assert sources.would_find(str(docs / out / "**"), str(docs / out / "inner" / "r.html"), tmp_path / "elsewhere")


def test_a_document_of_a_list_is_named_with_its_path(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text('{"id": "lease-7", "path": "contracts/lse.txt"}\n{"path": "other.txt"}\n')
    report = quantspec("batch", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "out"), "-n", "3", "--json").json
    lease, other = (result["error"]["message"] for result in report["results"])
    assert lease == f"lease-7 ({tmp_path}/contracts/lse.txt) does not exist"
    assert other == "other.txt does not exist"


def test_a_prompt_cache_is_not_among_the_documents(
    fake: Any, quantspec: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = ("--out", "out", "-n", "3")
    for documents in ("docs", "docs/*/*", "docs/**"):
        for flags in ([], ["--dry-run"]):
            outcome = quantspec("batch", documents, *out, "--prompt-cache", "docs/cache", *flags)
            outcome.assert_error(2, f"the prompt cache docs/cache would be documents of {documents}")
    for documents, cache in (("docs", "docs/.cache"), ("docs", "docs-cache"), ("docs/**/*.txt", "docs/cache")):
        assert quantspec("batch", documents, *out, "--prompt-cache", cache, "--dry-run").code == 0


def test_a_file_in_a_linked_folder_would_be_a_document(tmp_path: Path) -> None:
    docs, elsewhere = tmp_path / "docs", tmp_path / "elsewhere"
    (docs / "deep").mkdir(parents=True)
    elsewhere.mkdir()
    (docs / "deep" / "link").symlink_to(elsewhere)
    (docs / "deep" / "back").symlink_to(docs)
    for argument, path, found in (
        (docs, elsewhere / "r.html", True),
        (docs, elsewhere / "new" / "x.prompt", True),
        (docs, elsewhere / ".hidden" / "x.prompt", False),
        (docs, tmp_path / "r.html", False),
        (docs / "*.html", elsewhere / "r.html", False),
        (docs / "**" / "*.html", elsewhere / "r.html", True),
    ):
        assert sources.would_find(str(argument), str(path), tmp_path / "out") is found, (argument, path)


@given(st.lists(st.sampled_from(["a", "b", "*", "?", "**", "[ab]", ".a"]), min_size=1, max_size=4))
def test_a_glob_would_find_what_it_finds(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("found")
    files = [str(folder / file) for file in ("a", "b/a", "b/b/a", "b/b/b/a", ".a/a", "b/.a", ".b/.a/b")]
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    # Without a wildcard it would be no glob.
    for pattern in (str(folder / Path(*parts, last)) for last in ("[ab]", "**")):
        try:
            found = {source.path for source in sources.find([pattern], folder / "out")}
        except InputError:
            found = set()
        assert {file for file in files if sources.would_find(pattern, file, folder / "out")} == found


def test_answers_may_go_above_the_documents(
    fake: Any, quantspec: Run, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(docs.parent)
    names = ["a.txt", "deep/er/c.txt"]
    for arguments in (["docs"], ["docs/**/*.txt"]):
        report = quantspec("batch", *arguments, "--out", ".", "-n", "3", "--dry-run", "--json").json
        assert [row["document"] for row in report["results"] if row["document"] != "b.md"] == names
    quantspec("batch", "*", "--out", ".").assert_error(2, "--out . is also a directory of documents")


def test_a_glob_does_not_follow_loops(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    (docs / "loop").symlink_to(".")
    (docs / ".hidden").mkdir()
    (docs / ".hidden" / "d.txt").write_text("Hidden.")
    # By-products of Word and Windows.
    for name in ("~$a.txt", "deep/Thumbs.db", "desktop.ini"):
        (docs / name).write_bytes(b"\0")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "e.txt").write_text("In a linked folder.")
    (docs / "deep" / "link").symlink_to(linked)

    def found(pattern: str) -> list[str]:
        out = str(tmp_path / "out")
        report = quantspec("batch", str(docs / pattern), "--out", out, "-n", "3", "--dry-run", "--json").json
        return [row["document"] for row in report["results"]]

    assert found("**/*.txt") == ["a.txt", "deep/er/c.txt", "deep/link/e.txt"]
    assert found("**") == found("") == ["a.txt", "b.md", "deep/er/c.txt", "deep/link/e.txt"]
    assert found("**/er/**/*") == ["deep/er/c.txt"]
    assert found("**/.hidden/*") == [".hidden/d.txt"]
    assert found("deep/*/*.txt") == ["er/c.txt", "link/e.txt"]


def test_a_very_deep_folder_is_a_failed_document(fake: Any, quantspec: Run, docs: Path, tmp_path: Path) -> None:
    deep = docs
    for _ in range(201):
        deep /= "d"
        deep.mkdir()
    (deep / "lost.txt").write_text("x")
    outcome = quantspec("batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3", "--json")
    assert (outcome.code, outcome.json["done"], outcome.json["failed"]) == (4, 3, 1)
    assert "200 levels deep" in outcome.json["results"][0]["error"]["message"]


@given(st.text(st.characters(blacklist_characters="/\0"), min_size=1, max_size=300))
def test_every_name_has_a_place(name: str) -> None:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return
    place = sources.output_name(name, ".md")
    assert len(os.fsencode(place)) <= 255
    assert place.endswith(".md")
    assert place == name + ".md" or len(os.fsencode(name)) > 252


def test_sources_say_what_they_cannot_find(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the name of a document is empty"):
        sources.find([""], tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        sources.Source("x", str(tmp_path / "x")).read()
