"""Draft weights on disk from a user's view: they are read back, never block a run, and never change an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome, copy_demo

from quantspec_cli import Engine, settings

Run = Callable[..., Outcome]

COMMAND = ("run", "--text", "It was a dark and stormy night", "-n", "20", "--device", "cpu", "--gamma", "3")
CACHED = "with cached draft weights"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that accepts small models."""
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(tmp_path / "drafts"))
    monkeypatch.setattr(settings, "SMALLEST_DRAFTS_BYTES", 0)
    return tmp_path / "drafts"


def the_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_the_second_load_reads_and_the_text_is_the_same(
    quantspec: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quantspec(*COMMAND)
    assert (first.code, CACHED in first.stderr) == (0, False)
    path = the_file(folder)
    assert path.name.startswith("demo-int4-")
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    second = quantspec(*COMMAND)
    assert second.stdout == first.stdout
    assert CACHED in second.stderr
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", "off")
    third = quantspec(*COMMAND)
    assert (third.stdout, CACHED in third.stderr) == (first.stdout, False)


def test_small_models_leave_no_file(quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(tmp_path / "drafts"))
    assert quantspec(*COMMAND).code == 0
    assert not (tmp_path / "drafts").exists()


def test_only_methods_that_draft_with_them_make_them(quantspec: Run, folder: Path) -> None:
    without = [
        ["--method", "ar", "--gamma", "0"],
        ["--method", "kv4"],
        ["--method", "ngram"],
        ["--draft-weights", "none"],
    ]
    for flags in without:
        assert quantspec(*COMMAND, *flags).code == 0
        assert not folder.exists(), flags


@pytest.mark.parametrize("damage", ["truncated", "emptied", "one byte", "another file"])
def test_a_damaged_file_is_one_warning_and_is_replaced(quantspec: Run, folder: Path, damage: str) -> None:
    first = quantspec(*COMMAND)
    path = the_file(folder)
    sound = path.read_bytes()
    damaged = {
        "truncated": sound[: len(sound) // 2],
        "emptied": b"",
        "one byte": sound[:-1000] + bytes([sound[-1000] ^ 1]) + sound[-999:],
        "another file": b"PK\x03\x04" * 1000,
    }[damage]
    path.write_bytes(damaged)
    second = quantspec(*COMMAND)
    assert (second.code, second.stdout) == (0, first.stdout)
    warnings = [line for line in second.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, second.stderr
    assert str(path) in warnings[0]
    assert "damaged" in warnings[0]
    again = quantspec(*COMMAND)
    assert CACHED in again.stderr
    assert "warning" not in again.stderr


def test_changed_weights_never_meet_old_drafts(quantspec: Run, folder: Path, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model")
    weights = model / "model.safetensors"
    sound = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(sound)
    command = (*COMMAND, "--model", str(model), "--json")
    before = quantspec(*command).json
    times = weights.stat()
    # One weight in the middle becomes 0; size and time do not change.
    middle = len(sound) // 2
    weights.write_bytes(sound[:middle] + b"\x00\x00" + sound[middle + 2 :])
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    engine = Engine.load(str(model), device="cpu", context=500)
    # A weight affects the importance by which weights of later layers are rounded, so all are made again.
    assert engine.info["cached_drafts"] == 0
    assert engine.info["note"] is None
    assert Engine.load(str(model), device="cpu", context=500).info["cached_drafts"] == 1
    # Restored weights: the replaced drafts are made anew too.
    weights.write_bytes(sound)
    assert Engine.load(str(model), device="cpu", context=500).info["cached_drafts"] == 0
    assert quantspec(*command).json["results"] == before["results"]


def test_a_folder_that_cannot_be_written_is_one_warning(
    quantspec: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("/proc/quantspec", "/dev/null/drafts"):
        monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", place)
        outcome = quantspec(*COMMAND)
        assert outcome.code == 0
        assert outcome.stderr.count("warning: draft weights are not cached: ") == 1
        assert "QUANTSPEC_DRAFT_CACHE" in outcome.stderr
        assert "warning" not in quantspec(*COMMAND, "-q").stderr
        # A warning is not part of the document.
        assert quantspec(*COMMAND, "--json").json["results"][0]["new_tokens"] == 20


def test_a_full_disk_is_one_warning_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "drafts"
    program = (
        "import resource, sys; from quantspec_cli import settings, entry; settings.SMALLEST_DRAFTS_BYTES = 0; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)); sys.exit(entry.execute(sys.argv[1:]))"
    )
    environment = {**os.environ, "QUANTSPEC_DRAFT_CACHE": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMAND], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr.count("warning: draft weights are not cached: ") == 1
    assert "file too large" in done.stderr
    assert list(folder.iterdir()) == []


def test_doctor_shows_path_and_size(quantspec: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantspec("doctor", "--json").json["draft_cache"] == {"path": str(folder), "files": 0, "bytes": 0}
    quantspec(*COMMAND)
    kept = the_file(folder)
    size = kept.stat().st_size
    assert quantspec("doctor", "--json").json["draft_cache"] == {"path": str(folder), "files": 1, "bytes": size}
    assert f"draft cache {folder}: 1 file, " in quantspec("doctor").stdout
    # An unreadable or non-regular file does not hide the others.
    (folder / "gone.draft").symlink_to(folder / "nothing")
    (folder / "folder.draft").mkdir()
    os.mkfifo(folder / "pipe.draft")
    (folder / "other").write_text("x")
    # `quantspec cache` would not list these either.
    (folder / "foreign.draft").write_text("x")
    (folder / "link.draft").symlink_to(kept)
    assert quantspec("doctor", "--json").json["draft_cache"] == {"path": str(folder), "files": 1, "bytes": size}
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", f"{folder}\x1b[2J")
    assert "\x1b" not in quantspec("doctor").stdout
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(kept))
    reason = f"cannot read the cache of draft weights {kept}: not a directory"
    found = quantspec("doctor", "--json").json["draft_cache"]
    assert found == {"path": str(kept), "files": 0, "bytes": 0, "reason": reason}
    assert f"draft cache unusable: {reason}\n" in quantspec("doctor").stdout
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", "off")
    assert quantspec("doctor", "--json").json["draft_cache"] is None
    assert "draft cache off" in quantspec("doctor").stdout


def test_the_default_folder_is_next_to_the_hub_s(tmp_path: Path) -> None:
    program = "from quantspec_cli import settings; print(settings.draft_cache())"
    for variables, expected in (
        ({"HF_HOME": str(tmp_path)}, tmp_path / "assets" / "quantspec" / "drafts"),
        ({"HF_ASSETS_CACHE": str(tmp_path)}, tmp_path / "quantspec" / "drafts"),
        ({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "huggingface" / "assets" / "quantspec" / "drafts"),
        ({"HF_HOME": "/x", "QUANTSPEC_DRAFT_CACHE": "~/drafts", "HOME": str(tmp_path)}, tmp_path / "drafts"),
    ):
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "QUANTSPEC_"))
        }
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env={**clean, **variables}, check=True
        )
        assert done.stdout.strip() == str(expected)


def test_eval_reads_them_too(quantspec: Run, folder: Path) -> None:
    command = ("eval", "--tokens", "40", "--device", "cpu", "--json")
    first = quantspec(*command)
    assert "cached_drafts" not in first.json
    before = the_file(folder).stat().st_mtime_ns
    assert quantspec(*command).json == first.json
    assert the_file(folder).stat().st_mtime_ns == before
    the_file(folder).write_bytes(b"")
    assert "damaged" in quantspec(*command).stderr


def test_bench_reads_them_too(quantspec: Run, folder: Path) -> None:
    command = ("bench", "-p", "0", "-n", "4", "-r", "1", "--methods", "quantspec", "--device", "cpu")
    assert quantspec(*command).code == 0
    before = the_file(folder).stat().st_mtime_ns
    assert quantspec(*command).code == 0
    assert the_file(folder).stat().st_mtime_ns == before
    the_file(folder).write_bytes(b"")
    assert "damaged" in quantspec(*command).stderr
