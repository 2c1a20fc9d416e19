"""Checks that no files import each other in a circle, in the crates and in the Python package.

    python tools/check_circles.py

Files of one folder (`draft/`, `backend/`) are one concept and may import each other. Tests and imports for type checkers
alone do not count.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).parents[1]

# Comments, strings and character literals, which may contain braces and paths. A lifetime is no character literal.
_NO_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|r(#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\.[^']*|[^'\\])'""", re.DOTALL)
_TEST = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))?\s+)?(?:mod|fn|impl|use|struct|const)\b[^{;]*")
_PATH = re.compile(r"\bcrate::(?:(\w+)|(\{))")


def rust_imports(source: Path) -> dict[str, set[str]]:
    """What each top-level module of a crate's folder `src` imports, by name; the crate's root is "lib"."""
    modules = {path.stem for path in source.iterdir() if path.stem != "lib"}
    code = {
        path: _code(path.read_text()) for path in sorted(source.rglob("*.rs")) if path.stem not in {"tests", "testing"}
    }
    homes = dict(_reexports(code[source / "lib.rs"]))
    imports: defaultdict[str, set[str]] = defaultdict(set)
    for path, text in code.items():
        here = path.relative_to(source).parts[0].removesuffix(".rs")
        if here == "lib":
            named: Iterable[str] = re.findall(r"\b(\w+)::", re.sub(r"\bpub use [^;]*;", "", text))
        else:
            named = _crate_paths(text)
        for name in named:
            there = name if name in modules else homes.get(name, "lib")
            if there != here and (here != "lib" or name in modules):
                imports[here].add(there)
    return imports


def _code(text: str) -> str:
    """Rust code without comments, strings and tests."""
    text = _NO_CODE.sub(" ", text)
    while test := _TEST.search(text):
        end = test.end()
        if text[end : end + 1] == "{":
            end = _closing(text, end)
        text = text[: test.start()] + text[end + 1 :]
    return text


def _closing(text: str, opening: int) -> int:
    """Position of the brace that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    raise ValueError("a brace is not closed")


def _crate_paths(text: str) -> Iterator[str]:
    """The first name after `crate::` of every path."""
    for found in _PATH.finditer(text):
        if found[1]:
            yield found[1]
        else:
            yield from _first_names(text[found.end() : _closing(text, found.end() - 1)])


def _first_names(group: str) -> Iterator[str]:
    """First names of the paths in a group of imports: a and d of `a::{b, c}, d`."""
    while "{" in group:
        opening = group.index("{")
        group = group[:opening] + group[_closing(group, opening) + 1 :]
    for path in group.split(","):
        if path.strip():
            yield path.strip().partition("::")[0].partition(" ")[0]


def _reexports(root: str) -> Iterator[tuple[str, str]]:
    """Names that a crate's root takes from its modules, with the module."""
    for module, names in re.findall(r"\bpub use (\w+)::([^;]*);", root):
        for name in re.findall(r"\w+", names):
            yield name, module


def python_imports(package: Path) -> dict[str, set[str]]:
    """What each top-level module of a package imports, by name, inside functions too."""
    modules = {path.stem for path in package.iterdir()}
    imports: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        for node in _runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            # Relative imports that reach the package's top; deeper ones stay inside a folder.
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):
                names = [node.module.partition(".")[0]] if node.module else [name.name for name in node.names]
                imports[parts[0]] |= {name for name in names if name in modules} - {parts[0]}
    return imports


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those only type checkers see."""
    yield tree
    typing = isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING"
    for child in [] if typing else ast.iter_child_nodes(tree):
        yield from _runtime_nodes(child)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """One shortest circle through each module that has one, each circle once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(imports):
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop(0)
            for name in sorted(imports.get(path[-1], ())):
                if name == start:
                    found.setdefault(frozenset(path), [*path, start])
                    paths = []
                    break
                if name not in seen:
                    seen.add(name)
                    paths.append([*path, name])
    return list(found.values())


def main() -> int:
    """Prints the circles; 1 if there are any."""
    graphs = {f"crates/{path.parent.name}": rust_imports(path) for path in sorted(ROOT.glob("crates/*/src"))}
    graphs["python/quantspec_cli"] = python_imports(ROOT / "python" / "quantspec_cli")
    lines = [f"{place}: {' -> '.join(circle)}" for place, graph in graphs.items() for circle in circles(graph)]
    for line in lines:
        print(line)
    print(
        f"{len(lines)} circles of imports among {sum(len(graph) for graph in graphs.values())} files that import others"
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
