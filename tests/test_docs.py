"""The documentation: its links resolve, and its tables match benchmarks/results/."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_page_of_benchmarks_is_its_rendering() -> None:
    outcome = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/run.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr


def test_the_table_of_the_readme_is_its_json() -> None:
    torch = (ROOT / "benchmarks/results/h200-wide7-torch.jsonl").read_text().splitlines()
    rows = json.loads((ROOT / "benchmarks/results/h200-wide7.json").read_text())
    lines = re.findall(r"^\| (\d+)k \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    depths = sorted({row["n_depth"] for row in rows})
    assert len(lines) == len(depths)
    for (context, cells), depth, baseline in zip(lines, depths, torch, strict=True):
        assert round(depth / 1024) in (int(context), int(context) - 1)
        plain, *others = (row["ms_per_token"] for row in rows if row["n_depth"] == depth)
        int8, *drafted = others
        want = [
            f"{json.loads(baseline)['ms']:.2f}",
            f"{plain:.2f}",
            f"{int8:.2f}",
            *(f"{ms:.2f} ({plain / ms:.2f}×)" for ms in drafted),
        ]
        assert [cell.strip() for cell in cells.split("|")] == want


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
