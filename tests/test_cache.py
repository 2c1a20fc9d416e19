"""`quantspec cache`: what is listed, what is removed, and what is left alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome

from quantspec_cli import _native, settings

Run = Callable[..., Outcome]


@pytest.fixture
def folder(quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the demo model's drafts, next to a user's files."""
    folder = tmp_path / "drafts"
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(folder))
    monkeypatch.setattr(settings, "SMALLEST_DRAFTS_BYTES", 0)
    assert quantspec("run", "--text", "Once", "-n", "2", "--device", "cpu", "--gamma", "2").code == 0
    (folder / "notes.txt").write_text("mine")
    (folder / "other.draft").write_text("mine, too")
    (folder / "link.draft").symlink_to(next(folder.glob("demo-*.draft")))
    return folder


def test_the_list_shows_the_files(quantspec: Run, folder: Path) -> None:
    (path,) = folder.glob("demo-*.draft")
    document = json.loads(quantspec("cache", "--json").stdout)
    (file,) = document.pop("files")
    size = path.stat().st_size
    assert document == {"path": str(folder), "bytes": size, "limit_bytes": 64 << 30, "prompts": None, "cleared": False}
    assert (file["path"], file["bytes"], file["model"]) == (str(path), size, "demo")
    outcome = quantspec("cache")
    assert outcome.code == 0
    head, row = outcome.stdout.splitlines()
    assert head.startswith(f"{folder}: 1 file, ")
    assert row.endswith(f"{file['used'][:10]}  demo")


def test_clear_removes_draft_files_alone(quantspec: Run, folder: Path) -> None:
    outcome = quantspec("cache", "--clear")
    assert outcome.stdout.startswith(f"{folder}: removed 1 file, ")
    assert sorted(path.name for path in folder.iterdir()) == ["link.draft", "notes.txt", "other.draft"]
    assert quantspec("cache", "--clear").stdout.startswith(f"{folder}: removed 0 files, ")


def test_a_folder_that_is_absent_is_empty(quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(tmp_path / "none"))
    assert json.loads(quantspec("cache", "--json").stdout)["files"] == []


def test_a_time_beyond_the_calendar_is_listed(quantspec: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "draft_files", lambda _: [(folder / "a.draft", None, 1, 1e13)])
    (file,) = json.loads(quantspec("cache", "--json").stdout)["files"]
    assert file["used"].startswith("999")
    assert quantspec("doctor").code == 0


def test_a_folder_without_a_name_is_a_usage_error(quantspec: Run, folder: Path) -> None:
    """As of `run`: an unset variable of a script must not clear the other folder alone."""
    quantspec("cache", "--clear", "--prompt-cache", "").assert_error(2, "--prompt-cache is ''", "name a folder")
    assert any(folder.glob("demo-*.draft"))


def test_errors_are_one_line(quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", "off")
    outcome = quantspec("cache")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "error: the cache of draft weights is off\nhint: " in outcome.stderr
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(tmp_path / "file"))
    outcome = quantspec("cache")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert f"error: cannot read the cache of draft weights {tmp_path / 'file'}: not a directory\n" in outcome.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root removes from any folder")
def test_a_file_that_stays_is_an_error(quantspec: Run, folder: Path) -> None:
    folder.chmod(0o500)
    try:
        assert "error: cannot remove" in quantspec("cache", "--clear").stderr
    finally:
        folder.chmod(0o700)
