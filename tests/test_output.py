"""Where answers go: in order, under headings; files complete or absent."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fake_native
import pytest
from conftest import DEMO, Outcome
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli import output, render, signals
from quantspec_cli.errors import FileError, QuantspecError
from quantspec_cli.output import Answers, AtomicFile

Run = Callable[..., Outcome]


class Page:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_one_answer_has_no_heading_and_ends_with_a_line_break() -> None:
    page = Page()
    answers = Answers(page, ["a"])
    for piece in ["x", "", "y"]:
        answers.push(0, piece)
    assert page.text == "xy"
    answers.end(0)
    answers.close()
    assert page.text == "xy\n"


def test_a_pipe_takes_the_text_as_it_comes() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    file = AtomicFile(f"/dev/fd/{writer}")
    for piece in ("first\n", "second\n"):
        file.write(piece)
        assert os.read(reader, 100) == piece.encode()
    file.commit()
    os.close(reader)
    os.close(writer)


def test_a_full_device_is_an_error_at_the_first_write() -> None:
    file = AtomicFile("/dev/full")
    with pytest.raises(FileError, match="cannot be written"):
        file.write("x")
    file.discard()


def test_a_line_break_is_not_doubled_and_an_empty_answer_has_none() -> None:
    for pieces, expected in [(["x\n"], "x\n"), ([], "")]:
        page = Page()
        answers = Answers(page, ["a"])
        for piece in pieces:
            answers.push(0, piece)
        answers.close()
        assert page.text == expected


def test_the_first_open_answer_streams_and_the_others_wait() -> None:
    page = Page()
    answers = Answers(page, ["a", "b"])
    answers.push(1, "B1")
    answers.push(0, "A1")
    assert page.text == "==> a <==\nA1"
    answers.end(1)
    answers.push(0, "A2")
    answers.end(0)
    assert page.text == "==> a <==\nA1A2\n\n==> b <==\nB1\n"


def test_a_heading_comes_with_the_first_text() -> None:
    """Not before: a prompt takes minutes, and Ctrl-C would leave the heading alone."""
    page = Page()
    answers = Answers(page, ["a", "b", "c"])
    answers.push(0, "")
    assert page.text == ""
    answers.push(0, "A")
    answers.end(0)
    assert page.text == "==> a <==\nA\n"
    answers.end(1)
    assert page.text == "==> a <==\nA\n\n==> b <==\n"


@given(st.lists(st.tuples(st.integers(0, 2), st.text("xy\n", max_size=3)), max_size=30), st.permutations([0, 1, 2]))
def test_the_order_of_events_does_not_change_the_page(events: list[tuple[int, str]], ends: list[int]) -> None:
    page = Page()
    answers = Answers(page, ["a", "b", "c"])
    for index, text in events:
        answers.push(index, text)
    for index in ends:
        answers.end(index)
    expected = []
    for index, name in enumerate("abc"):
        body = "".join(text for place, text in events if place == index)
        expected.append(f"==> {name} <==\n{body}" + ("" if body.endswith("\n") or not body else "\n"))
    assert page.text == "\n".join(expected)


def test_text_held_up_by_a_signal_is_written_once() -> None:
    page = Page()
    answers = Answers(page, ["a", "b"])
    answers.push(0, "A1")
    answers.push(1, "B1")
    answers.push_rest(0, "A1A2A3")
    answers.push_rest(1, "B1")
    answers.close()
    assert page.text == "==> a <==\nA1A2A3\n\n==> b <==\nB1\n"


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_signal_after_a_piece_does_not_lose_it(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    push, calls = Answers.push, []

    def interrupted(answers: Answers, index: int, text: str) -> None:
        calls.append(text)
        if len(calls) == at:
            raise KeyboardInterrupt
        push(answers, index, text)

    monkeypatch.setattr(Answers, "push", interrupted)
    out = tmp_path / "out"
    outcome = quantspec("run", "--text", "one", "--text", "two", "-n", "40", "-q", "--json", "-o", str(out))
    assert outcome.code == 130, outcome
    first, second = (result["text"] for result in outcome.json["results"])
    page = Page()
    answers = Answers(page, ["text 1", "text 2"])
    answers.push_rest(0, first)
    answers.push_rest(1, second)
    answers.close()
    assert any((first, second))
    assert out.read_text(encoding="utf-8") == page.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (999_600_000, "1 GB"),
        (1_234_567_890, "1.23 GB"),
        (999_700_000_000, "1 TB"),
        (2_164_000_000_000, "2.16 TB"),
        (4_321_000_000_000_000, "4,321 TB"),
    ],
)
def test_sizes_have_no_exponent(value: int | None, text: str) -> None:
    assert render.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (1e-9, "0 ms"),
        (0.01234, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "0.9996 s"),
        (61.23456, "61.23 s"),
        (999.94, "999.9 s"),
        (999.96, "1,000 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_times_have_no_exponent(value: float | None, text: str) -> None:
    assert render.seconds(value) == text


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with AtomicFile(str(path)) as file:
        file.write("half")
        assert not path.exists()
        file.write(" é\r\n")
    assert path.read_bytes() == "half é\r\n".encode()
    assert os.listdir(tmp_path) == ["out.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o664)
    with pytest.raises(KeyboardInterrupt), AtomicFile(str(path)) as file:
        file.write("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]
    with AtomicFile(str(path)) as file:
        file.write("new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_a_link_is_followed_and_a_device_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with AtomicFile(str(link)) as file:
        file.write("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    with AtomicFile(os.devnull) as file:
        file.write("gone")
    assert not Path(os.devnull).is_file()


def test_links_in_a_loop_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(FileError, match="too many levels"):
        AtomicFile(str(tmp_path / "one"))


def test_a_link_that_another_user_planted_is_not_followed(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a link of another user")
    shared, target = tmp_path / "shared", tmp_path / "target"
    shared.mkdir()
    link, indirect = shared / "link", tmp_path / "indirect"
    link.symlink_to("../target")
    indirect.symlink_to(link)

    def write(path: Path) -> str:
        target.write_text("old")
        with AtomicFile(str(path)) as file:
            file.write("new")
        assert link.is_symlink()
        return target.read_text()

    other = 12_345
    shared.chmod(0o1777)
    assert write(link) == "new"
    os.chown(link, other, -1, follow_symlinks=False)
    for path in (link, indirect):
        with pytest.raises(FileError, match=rf"output {link} is a link of user {other} in a world-writable folder"):
            write(path)
    assert target.read_text() == "old"
    # Not followed if another user placed it, nor in a folder where only its owner could have.
    os.chown(shared, other, -1)
    assert write(link) == "new"
    os.chown(shared, 0, -1)
    shared.chmod(0o1755)
    assert write(indirect) == "new"


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(QuantspecError, match="no space left"), AtomicFile("/dev/full") as file:
        file.write("x")


def test_a_path_that_is_taken_meanwhile_loses_no_text(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"

    def write() -> None:
        with AtomicFile(str(path)) as file:
            file.write("an hour's work")
            path.mkdir()

    with pytest.raises(FileError, match="is a directory") as caught:
        write()
    kept = Path(str(caught.value.hint).removeprefix("the complete text is in "))
    assert kept.read_text() == "an hour's work"


def test_a_place_that_cannot_be_written_is_an_error_before_any_work(fake: type, quantspec: Run, tmp_path: Path) -> None:
    quantspec("run", "--text", "x", "-o", str(tmp_path / "no" / "out.txt")).assert_error(
        1, "does not exist", "mkdir -p"
    )
    quantspec("run", "--text", "x", "-o", str(tmp_path)).assert_error(2, "is a directory")
    quantspec("run", "--text", "x", "-o", "").assert_error(2, "empty")
    quantspec("run", "--text", "x", "-o", "x" * 300).assert_error(1, "cannot be written", "name too long")
    quantspec("run", "--text", "x", "-o", "/proc/quantspec.txt").assert_error(1, "cannot be written")
    (tmp_path / "file").touch()
    quantspec("run", "--text", "x", "-o", str(tmp_path / "file" / "out.txt")).assert_error(1, "cannot be written")
    assert fake.engines == []  # type: ignore[attr-defined]


def test_the_answer_goes_to_the_file_instead_of_stdout(fake: type, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    printed = quantspec("run", "--text", "one", "--text", "two", "-n", "9")
    written = quantspec("run", "--text", "one", "--text", "two", "-n", "9", "-o", str(path))
    assert (written.code, written.stdout) == (0, "")
    assert path.read_text() == printed.stdout
    assert written.stderr == printed.stderr


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    with AtomicFile(str(path)) as file:
        file.write("text")
    assert path.read_text() == "text"


def test_a_folder_that_is_gone_is_one_error(
    fake: type, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        quantspec("run", "--text", "x", "-o", "out.txt").assert_error(1, "cannot be written", "no such file")
        with AtomicFile(str(tmp_path / "out.txt")) as file:
            assert not file.is_at("out.txt")
    finally:
        monkeypatch.undo()


def test_a_dash_is_standard_output(fake: type, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = quantspec("run", "--text", "one", "-n", "9", "-o", "-")
    assert printed == quantspec("run", "--text", "one", "-n", "9")
    assert printed.stdout
    assert os.listdir(tmp_path) == []


def test_names_of_files_cannot_move_the_cursor(fake: type, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b[31mb"
    path.write_text("It was")
    outcome = quantspec("run", "-p", str(path), "--text", "x", "-n", "3")
    assert outcome.code == 0
    for text in (outcome.stdout, outcome.stderr):
        assert "\x1b" not in text
        assert "a \N{REPLACEMENT CHARACTER}[31mb" in text
    assert quantspec("run", "-p", str(path), "-n", "3", "--json").json["results"][0]["prompt"] == str(path)


def test_a_file_that_cannot_be_written_costs_no_answer_of_the_document(
    fake: type, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "--text", "x", "--text", "y", "-n", "30", "--json"]
    whole = quantspec(*command).json
    reader, writer = os.pipe()
    os.close(reader)
    found = [quantspec(*command, "-o", place) for place in ("/dev/full", f"/dev/fd/{writer}")]
    os.close(writer)
    path = tmp_path / "out.txt"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found.append(quantspec(*command, "-o", str(path)))
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["out.txt"])
    for outcome in found:
        document = outcome.json
        assert (outcome.code, document.pop("error")["kind"]) == (1, "io")
        assert document["results"] == whole["results"]
        assert (document.keys(), document["stats"].keys()) == (whole.keys(), whole["stats"].keys())


def test_json_goes_to_stdout_and_the_answer_to_the_file(fake: type, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    outcome = quantspec("run", "--text", "one", "-n", "9", "--json", "-o", str(path))
    assert path.read_text() == outcome.json["results"][0]["text"] + "\n"


def test_the_name_of_a_directory_is_not_a_file(fake: type, quantspec: Run, tmp_path: Path) -> None:
    quantspec("run", "--text", "x", "-o", f"{tmp_path}/new/").assert_error(2, "directory")
    assert os.listdir(tmp_path) == []


def test_a_file_called_dash_is_not_standard_input(
    fake: type, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "in").open("wb+") as file:
        file.write(b"Once upon a time")
        file.seek(0)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        assert quantspec("run", "--prompt", "-", "-n", "3", "-o", "./-").code == 0
    assert (tmp_path / "-").read_text() != ""


def test_a_prompt_is_not_overwritten(fake: type, quantspec: Run, document: Path) -> None:
    quantspec("run", "-p", str(document), "-o", f"{document.parent}/./{document.name}").assert_error(2, "also an input")
    assert document.read_text().startswith("It was")


def test_a_model_is_not_overwritten(fake: type, quantspec: Run, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    for command in (
        ["run", "--text", "x", "-m", str(model), "-o", str(model)],
        ["run", "--text", "x", "--method", "draft-model", "--draft-model", str(model), "-o", str(model)],
        ["eval", "-m", str(model), "--report", str(model)],
        ["bench", "-m", f"demo,{model}", "--output", str(model)],
        ["bench", "kernels", "-m", str(model), "--output", str(model)],
    ):
        quantspec(*command).assert_error(2, "also an input")
    assert model.read_bytes() == b"weights"
    # Another part of a split GGUF file.
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    second.write_bytes(b"weights")
    quantspec("run", "--text", "x", "-m", str(first), "-o", str(second)).assert_error(2, "also an input")


def test_the_files_of_a_model_directory_are_not_overwritten(fake: type, quantspec: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    # As in the hub's cache, where the files of a model are links.
    (model / "config.json").rename(tmp_path / "linked.json")
    (model / "config.json").symlink_to(tmp_path / "linked.json")
    for command in (
        ["run", "--text", "x", "-m", str(model), "-o", f"{model}/config.json"],
        ["run", "--text", "x", "-m", str(model), "-o", f"{tmp_path}/linked.json"],
        ["run", "--text", "x", "--method", "draft-model", "--draft-model", str(model), "-o", f"{model}/tokenizer.json"],
        ["batch", __file__, "-m", str(model), "--out", f"{tmp_path}/out", "--report", f"{model}/model.safetensors"],
        ["eval", "-m", str(model), "--report", f"{model}/tokenizer.json"],
        ["bench", "-m", f"demo,{model}", "--output", f"{model}/config.json"],
        ["bench", "kernels", "-m", str(model), "--output", f"{model}/config.json"],
    ):
        quantspec(*command).assert_error(2, "also an input")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    # Other files there are the user's.
    for _ in range(2):
        assert quantspec("run", "--text", "x", "-n", "3", "-m", str(model), "-o", f"{model}/a.txt", "-q").code == 0


def test_a_schema_is_not_overwritten(fake: type, quantspec: Run, document: Path, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "integer"}')
    flags = ("-n", "3", "--json-schema", str(schema))
    quantspec("run", str(document), *flags, "-o", str(schema)).assert_error(2, "also an input")
    out = str(tmp_path / "out")
    quantspec("batch", str(document), "--out", out, *flags, "--report", str(schema)).assert_error(2, "also an input")
    assert schema.read_text() == '{"type": "integer"}'


def test_an_error_before_the_first_token_leaves_no_file(
    fake: type, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise fake_native.NativeError("not_finite", "logits are NaN", "check the weights")

    monkeypatch.setattr(fake_native.Engine, "prefill", fail)
    path = tmp_path / "out.txt"
    quantspec("run", "--text", "x", "-o", str(path)).assert_error(1, "logits are NaN")
    assert os.listdir(tmp_path) == []
    outcome = quantspec("run", "--text", "x", "--json")
    assert outcome.json.keys() == {"error"}


def test_an_error_on_the_way_keeps_the_text_of_all_prompts(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    command = ["run", "--text", "one", "--text", "two", "-n", "60"]
    # Rounds of the two prompts until the error emit 1, 3 and 1, 6 and 2, 5 tokens, plus one per prefill.
    fake.accepted = [2, 0, 5, 1, 4]
    whole = quantspec(*command, "--json", "--gamma", "5").json["results"]
    fake.fail, fake.fail_after = ("device", "the device fell off", "plug it in"), 2
    path = tmp_path / "out.txt"
    error = "error: the device fell off\nhint: plug it in\n"
    printed = quantspec(*command, "--gamma", "5")
    assert (printed.code, printed.stderr) == (1, error)
    written = quantspec(*command, "--gamma", "5", "-o", str(path))
    assert (written.code, written.stdout, written.stderr) == (1, "", error)
    assert path.read_text() == printed.stdout
    document = quantspec(*command, "--gamma", "5", "--json", "-o", str(path))
    assert (document.code, document.stderr, path.read_text()) == (1, error, printed.stdout)
    assert document.json.keys() == {"error", "results"}
    assert document.json["error"]["kind"] == "device"
    for name, result, full in zip(["text 1", "text 2"], document.json["results"], whole, strict=True):
        assert (result["prompt"], result["stop_reason"]) == (name, "interrupted")
        assert 1 < result["new_tokens"] < 60
        assert full["tokens"][: result["new_tokens"]] == result["tokens"]
        assert f"==> {name} <==\n{result['text']}" in printed.stdout


def test_a_full_disk_on_the_way_leaves_no_half_file(
    fake: Any, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise FileError("no space left on device", "free some space")

    monkeypatch.setattr(AtomicFile, "write", full)
    quantspec("run", "--text", "x", "-o", str(tmp_path / "out.txt")).assert_error(1, "no space left")
    assert os.listdir(tmp_path) == []


def test_signals_are_held_back_from_a_finished_document_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    for document, ends in ((None, True), ({"text": "x"}, False)):
        came = signals.Signals()
        monkeypatch.setattr(output, "SIGNALS", came)
        output.Done(document=document)
        now[0] += 1
        with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
            came._arrived(signal.SIGTERM, None)
        now[0] += 0.1
        came._arrived(signal.SIGTERM, None)  # a repeat of the one before
        now[0] += 1
        with pytest.raises(KeyboardInterrupt):
            came._arrived(signal.SIGTERM, None)
        assert came.number == signal.SIGTERM
