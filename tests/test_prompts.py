"""Prompts: read completely and unchanged, or refused with the position of the problem."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from quantspec_cli import prompts
from quantspec_cli.errors import InputError

Run = Callable[..., Outcome]


def test_a_document_is_unchanged_but_for_its_mark() -> None:
    assert prompts.from_bytes("x", "\ufeffa\r\nb \n".encode()).text == "a\r\nb \n"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", ["empty"]),
        (b"\xef\xbb\xbf", ["empty"]),
        (b" \n\t\n", ["white space"]),
        (b"text\0more", ["binary", "offset 4"]),
        (b"\x7fELF\x02\x01\x01\0", ["binary", "offset 7"]),
        ("text".encode("utf-16"), ["UTF-16, not", "iconv -f UTF-16"]),
        (b"\xfe\xff" + "text".encode("utf-16-be"), ["UTF-16, not"]),
        ("text".encode("utf-32"), ["UTF-32, not", "iconv -f UTF-32"]),
        (b"\0\0\xfe\xff" + "text".encode("utf-32-be"), ["UTF-32, not"]),
        ("line one\ncafé".encode("latin-1"), ["0xe9", "offset 12", "line 2"]),
        (b"\xef\xbb\xbfok\xff", ["0xff", "offset 5", "line 1"]),
        (b"cut \xe4\xb8", ["0xe4", "offset 4"]),
        (b"surrogate \xed\xa0\x80", ["0xed", "offset 10"]),
    ],
)
def test_a_file_that_is_not_text_is_one_error(
    fake: object, quantspec: Run, tmp_path: Path, raw: bytes, words: list[str]
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(raw)
    quantspec("run", "--prompt", str(path)).assert_error(1, str(path), *words)


def test_a_file_that_is_not_there_is_one_error(fake: object, quantspec: Run, tmp_path: Path) -> None:
    quantspec("run", "--prompt", str(tmp_path / "nothing.txt")).assert_error(1, "does not exist", "--text")
    (tmp_path / "link").symlink_to("nowhere")
    quantspec("run", str(tmp_path / "link")).assert_error(
        1, "link is a link to nowhere, which does not exist", "restore"
    )
    quantspec("run", "--prompt", str(tmp_path)).assert_error(1, "is a directory", "quantspec batch")
    quantspec("run", "--prompt", "a\0b").assert_error(1, "cannot be read")
    for command in ("run", "eval", "bench"):
        quantspec(command, "--prompt", "").assert_error(2, "the name of a prompt is empty", "name a file")
    quantspec("run", "--prompt", "x" * 5000).assert_error(1, "cannot be read")


def test_a_file_without_permission_is_one_error(
    fake: object, quantspec: Run, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(prompts, "read_whole", refuse)  # root may read every file, whatever its mode
    quantspec("run", "--prompt", str(document)).assert_error(1, "permission denied")


def test_no_prompt_is_a_usage_error_and_never_waits(fake: object, quantspec: Run) -> None:
    quantspec("run").assert_error(2, "no prompt", "standard input", "--text")
    quantspec("run", "--text", "").assert_error(1, "empty")
    quantspec("run", "-p", "-", "-p", "-").assert_error(2, "standard input")


def test_half_a_pair_on_the_command_line_is_one_error(fake: object, quantspec: Run) -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        prompts.read_all([], ["a\udcff"])
    for flag in ("--instruction", "--system-prompt", "--stop"):
        quantspec("run", "--text", "x", flag, "caf\udce9").assert_error(1, "not UTF-8", "character 3")


def test_half_a_pair_in_an_escape_is_one_error(fake: object, quantspec: Run, tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    listed.write_text('{"id": "a", "text": "x \\ud800"}')
    outcome = quantspec("batch", str(listed), "--out", str(tmp_path / "out"))
    outcome.assert_error(1, "character 2 is half of a pair", "hint: correct \\ud800, half of a surrogate pair")


def test_a_stream_without_end_is_refused(fake: object, quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    quantspec("run", "--prompt", "/dev/zero").assert_error(1, "binary", "offset 0")
    monkeypatch.setattr(prompts, "BYTES_MAX", 10_000_000)
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        path = f"/dev/fd/{endless.stdout.fileno()}"
        quantspec("run", "--prompt", path).assert_error(3, "more than 10000000 bytes")
        endless.kill()


def test_a_document_is_hashed_whole(
    fake: object, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = b"\0" + b"x" * (2 << 20)
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.bin").write_bytes(binary)

    def result(out: str) -> Any:
        (found,) = quantspec("batch", str(folder), "--out", str(tmp_path / out), "-n", "3", "--json").json["results"]
        assert "a binary file (zero byte at offset 0)" in found["error"]["message"]
        return found["sha256"]

    assert result("whole") == hashlib.sha256(binary).hexdigest()
    monkeypatch.setattr(prompts, "BYTES_MAX", 1 << 20)
    assert result("beyond") is None


def test_a_text_of_a_list_may_be_empty_and_has_no_zero(fake: object, quantspec: Run, tmp_path: Path) -> None:
    listed = tmp_path / "list.jsonl"
    batch = ("batch", str(listed), "--out", str(tmp_path / "out"), "-n", "3")
    listed.write_text('{"id": "a\\u0000", "text": "x"}')
    quantspec(*batch).assert_error(1, "'id' in line 1", "has a zero character", "leave it out")
    listed.write_text('{"id": "a", "text": ""}\n{"id": "b", "text": "x"}')
    outcome = quantspec(*batch, "--json")
    errors = {found["document"]: found["error"] for found in outcome.json["results"]}
    assert (outcome.code, errors["a"]["message"], errors["b"]) == (4, "a is empty", None)


def test_dash_reads_standard_input(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = start("run", "--prompt", "-", "-n", "3", "--json", stdin=subprocess.PIPE)
    out, _ = child.communicate("der Fluß".encode(), timeout=60)
    assert child.returncode == 0
    assert b'"prompt": "stdin"' in out


@pytest.mark.slow
def test_standard_input_that_pauses_is_read_to_its_end(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = start("run", "--prompt", "-", "-n", "3", "--json", stdin=reader)
    os.close(reader)
    for piece in (b"Once upon a time ", b"there was a river."):
        time.sleep(1.5)
        os.write(writer, piece)
    os.close(writer)
    out, _ = child.communicate(timeout=60)
    tokens = start("run", "--text", "Once upon a time there was a river.", "-n", "3", "--json").communicate(timeout=60)
    counts = [json.loads(text)["results"][0]["prompt_tokens"] for text in (out, tokens[0])]
    assert counts[0] == counts[1]


def test_invalid_standard_input_is_one_error(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = start("run", "--prompt", "-", stdin=subprocess.PIPE)
    out, err = child.communicate(b"ab\xff", timeout=60)
    assert (child.returncode, out) == (1, b"")
    assert err.startswith(b"error: stdin is not UTF-8: byte 0xff at offset 2, line 1\nhint: ")
    assert b" iconv -f CP1252 " in err
