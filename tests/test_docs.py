"""The documentation: its links resolve, and its tables match benchmarks/results/."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from quantspec_cli import _native
from quantspec_cli.engine import Statistics

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's titles, by GitHub's rules."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        if re.match(r"\w+:", path):
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), path + anchor


def test_pages_are_short() -> None:
    """README.md is read in three minutes, a page of docs/ in five. The page of benchmarks is tables to look things up in."""
    pages = {page: 800 if page.parent.name == "design" else 1200 for page in ROOT.glob("docs/**/*.md")}
    pages |= {ROOT / "README.md": 900}
    del pages[ROOT / "docs/benchmarks.md"]
    words = {page.relative_to(ROOT): (len(page.read_text().split()), most) for page, most in pages.items()}
    assert not {page: count for page, count in words.items() if count[0] > count[1]}


def test_the_page_of_benchmarks_is_its_rendering() -> None:
    outcome = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/page.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("commit", ["0123456789ab", "0123456789ab with changes", None])
def test_benchmarks_record_the_commit_of_the_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commit: str | None
) -> None:
    monkeypatch.setattr(_native, "COMMIT", commit)
    monkeypatch.setattr(sys, "argv", ["run.py", "--commit"])
    main = runpy.run_path(str(ROOT / "benchmarks/run.py"))["main"]
    if commit == "0123456789ab":
        main()
        assert capsys.readouterr().out == "0123456789ab\n"
    else:
        with pytest.raises(SystemExit, match=f"the installed build is of commit {commit}"):
            main()


def test_the_table_of_the_readme_is_its_json() -> None:
    cases = json.loads((ROOT / "benchmarks/results/llama_cpp.json").read_text())["cases"]
    want = [
        [case["weights"], f"{depth:,}"]
        + [f"{row['tokens_per_s']:.0f}" for row in case["rows"] if row["depth"] == depth]
        for case in cases
        if case["file"].startswith("SmolLM2")
        for depth in sorted({row["depth"] for row in case["rows"]})
    ]
    page = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\| (int\d \|.*) \|$", page, re.MULTILINE)
    assert [line.split(" | ") for line in lines] == want
    prompts = [row for case in cases if case["file"].startswith("SmolLM2") for row in case["prompts"]]
    ratios = [row["quantspec"] / row["llama.cpp"] for row in prompts]
    assert f"processed {min(ratios):.1f} to {max(ratios):.1f} times as fast as by llama.cpp" in page


def test_speedups_of_the_readme_are_those_of_the_json() -> None:
    """A row per shape: against plain decoding with the same cache, then with an FP16 cache, from the shortest context on."""
    speedups = []
    for shape in ("wide7", "wide8"):
        rows = json.loads((ROOT / f"benchmarks/results/h200-{shape}.json").read_text())
        ms = {
            (row["method"], row["kv_target"], row["draft_pages"], row["n_depth"]): row["ms_per_token"] for row in rows
        }
        speedups += [
            ms["ar", plain, "all", depth] / ms["quantspec", "int8", "auto", depth]
            for plain in ("int8", "fp16")
            for depth in sorted({row["n_depth"] for row in rows})
        ]
    page = (ROOT / "README.md").read_text()
    assert re.findall(r"([\d.]+)×", page) == [f"{speedup:.2f}" for speedup in speedups]
    same_cache = speedups[:3] + speedups[6:9]
    assert f"{min(same_cache):.1f} to {max(same_cache):.1f} times as fast as plain" in page


def test_the_page_names_every_field_of_stats() -> None:
    table = (ROOT / "docs/json.md").read_text().split("| field of `stats` |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert sorted(named) == sorted(Statistics.__annotations__)


def test_code_that_a_design_page_names_exists() -> None:
    """Files with a path (NAME stands for a new one), and names of tests followed by "in" and their file."""
    for page in ROOT.glob("docs/design/*.md"):
        text = page.read_text()
        for path in re.findall(r"`((?:crates|kernels|python|tests|tools)/[\w./-]+)`", text):
            assert "NAME" in path or (ROOT / path).exists(), f"{page.name}: {path}"
        for name, path in re.findall(r"`(\w+)`\s+in\s+`((?:crates|tests)/[\w./]+\.(?:rs|py))`", text):
            assert name in (ROOT / path).read_text(), f"{page.name}: {name} in {path}"


def test_long_names_of_code_exist() -> None:
    """Identifiers with three underscores or more are mostly names of tests."""
    folders = ("crates", "kernels", "python", "tests", "tools")
    suffixes = {".rs", ".py", ".cu", ".cuh"}
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    for page in [ROOT / "ARCHITECTURE.md", *ROOT.glob("docs/design/*.md")]:
        for name in re.findall(r"`(\w+)`", page.read_text()):
            assert name.count("_") < 3 or name in words, f"{page.name}: {name}"
