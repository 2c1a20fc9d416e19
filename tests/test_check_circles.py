"""tools/check_circles.py, on sources made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import tool

LIB = "mod high;\nmod low;\nmod middle;\npub use middle::Middle;\npub fn at_root() {}\n"


@pytest.fixture(scope="module")
def check() -> Any:
    return tool("check_circles")


def crate(folder: Path, **files: str) -> Path:
    for name, text in {"lib": LIB, **files}.items():
        (folder / f"{name}.rs").write_text(text)
    return folder


@pytest.mark.parametrize(
    "low",
    [
        "use crate::high::Top;",
        "use crate::{\n    middle::{One, Two},\n    high,\n};",
        "fn work<'a>() -> char { crate::high::call(); '{' }",
        'pub(crate) fn work() { let brace = "{"; crate::high::call() }\n#[cfg(test)]\nmod tests { fn test() {} }',
    ],
)
def test_a_circle_in_a_crate_is_found(check: Any, tmp_path: Path, low: str) -> None:
    source = crate(tmp_path, low=low, middle="use crate::low::work;", high="use crate::Middle;")
    imports = check.rust_imports(source)
    assert imports["high"] == {"middle"}
    circles = check.circles(imports)
    assert ["high", "middle", "low", "high"] in circles


@pytest.mark.parametrize(
    "low",
    [
        "// use crate::high::Top;",
        "/// Like [`crate::high`].\npub fn work() {}",
        'const TEXT: &str = "crate::high::Top";',
        "#[cfg(test)]\nmod tests {\n    use crate::high::Top;\n    fn nested() { if true {} }\n}",
        "use std::high::Top;",
        "fn work() { crate::at_root() }",
    ],
)
def test_comments_strings_and_tests_import_nothing(check: Any, tmp_path: Path, low: str) -> None:
    source = crate(tmp_path, low=low, middle="use crate::low::work;", high="use crate::middle::Middle;")
    assert check.circles(check.rust_imports(source)) == []


def test_files_of_one_folder_may_import_each_other(check: Any, tmp_path: Path) -> None:
    source = crate(tmp_path, low="mod one;\nuse crate::low::one::One;", middle="", high="use crate::low::Low;")
    (source / "low").mkdir()
    (source / "low" / "one.rs").write_text("use crate::low::Low;")
    assert check.rust_imports(source) == {"high": {"low"}}
    (source / "low" / "one.rs").write_text("use crate::high::High;")
    assert check.circles(check.rust_imports(source)) == [["high", "low", "high"]]


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        ("from . import high", [["high", "low", "high"]]),
        ("def late():\n    from .high import top", [["high", "low", "high"]]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .high import Top", []),
        ("import high", []),
    ],
)
def test_a_circle_in_the_package_is_found(check: Any, tmp_path: Path, low: str, expected: list[list[str]]) -> None:
    (tmp_path / "low.py").write_text(low)
    (tmp_path / "high").mkdir()
    (tmp_path / "high" / "__init__.py").write_text("from .inner import one\n")
    (tmp_path / "high" / "inner.py").write_text("from ..low import two\nfrom . import other\n")
    assert check.circles(check.python_imports(tmp_path)) == expected


def test_the_project_has_none(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main() == 0, capsys.readouterr().out
