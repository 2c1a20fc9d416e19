"""Formulas of Word (OMML) and of web pages (MathML) on one line: fractions with /, binomials as C(n, k), powers and indices,
roots, brackets, rows with ; between them.

Without them 1/2 would be read as 12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

from .blocks import shifted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Deeper elements are read as a row of characters.
_DEPTH_MAX = 40
# Elements of MathML whose characters are not shown: other forms of the formula, and room for them.
_UNSEEN = frozenset({"annotation", "annotation-xml", "mphantom"})
# No element, as its name has a space.
_BINOMIAL = "a binomial"
_SIMPLE = re.compile(r"\w+|[\d.,]+|")
# Widths of a fraction's bar that is not drawn.
_NO_BAR = re.compile(r"0+(\.0*)?([a-z]+|%)?")


@dataclass
class _Node:
    name: str
    values: Mapping[str, str]
    parts: list[_Node | str] = field(default_factory=list)


class Formula:
    """A formula, from the events of a parser; names of elements are without their namespace.

    Attributes:
        empty: it has no characters of its own, only signs of its elements.
    """

    def __init__(self) -> None:
        self.empty = True
        self._open = [_Node("", {})]
        self._deeper = 0

    def start(self, name: str, values: Mapping[str, str]) -> None:
        """An element begins; `values` are its attributes, also without a namespace."""
        if len(self._open) > _DEPTH_MAX:
            self._deeper += 1
            return
        node = _Node(name, values)
        self._open[-1].parts.append(node)
        self._open.append(node)

    def end(self, name: str) -> None:
        """An element ends, and those in it that are still open."""
        if self._deeper:
            self._deeper -= 1
        elif any(node.name == name for node in self._open[1:]):
            while self._open.pop().name != name:
                pass

    def data(self, text: str) -> None:
        """Characters that the formula shows."""
        if text:
            self.empty = False
            self._open[-1].parts.append(text)

    def text(self) -> str:
        """The formula on one line."""
        return _row(self._open[0]).strip()


def _row(node: _Node | str) -> str:
    """The parts of an element, each after the other, unless the element has a form of its own."""
    if isinstance(node, str):
        return node
    if node.name in _UNSEEN:
        return ""
    form = _FORMS.get(node.name)
    return _joined(node) if form is None else form(node)


def _joined(node: _Node) -> str:
    """The parts of an element, each after the other. Round brackets around nothing but a stack are those of a binomial."""
    parts: list[_Node | str] = []
    for part in node.parts:
        parts.append(part)
        if len(parts) > 2 and _sole(part) == ")" and _is_stack(stack := _sole(parts[-2])) and _sole(parts[-3]) == "(":
            parts[-3:] = [_Node(_BINOMIAL, {}, [stack])]
    return "".join(map(_row, parts))


def _sole(part: _Node | str) -> _Node | str:
    """What an element shows, without the elements around it, if it is one part."""
    while isinstance(part, _Node) and part.name not in _FORMS and len(inner := _content(part)) == 1:
        part = inner[0]
    return part


def _content(node: _Node) -> list[_Node | str]:
    return [part for part in node.parts if isinstance(part, str) or not part.name.endswith("Pr")]


def _is_stack(part: _Node | str) -> TypeGuard[_Node]:
    """True for a fraction without a bar."""
    return isinstance(part, _Node) and (
        (part.name == "f" and _property(part, "fPr", "type", "") == "noBar")
        or (part.name == "mfrac" and _NO_BAR.fullmatch(part.values.get("linethickness", "")) is not None)
    )


def _fraction(node: _Node) -> str:
    above, below = _shown(node, 2)
    if _is_stack(node):
        return "; ".join(filter(None, (above, below)))
    return f"{_grouped(above)}/{_grouped(below)}"


def _binomial(node: _Node) -> str:
    (stack,) = node.parts
    assert isinstance(stack, _Node)
    return f"C({', '.join(_shown(stack, 2))})"


def _with_scripts(base: str, sub: str, sup: str) -> str:
    return base + _script(sub, up=False) + _script(sup, up=True)


def _with_prescripts(scripts: str, base: str) -> str:
    """Scripts before their base, apart from the text before them: 2 ¹⁴C is not 2¹⁴C."""
    apart = " " if {"_", "^"} & set(scripts) else ""
    return f" {scripts}{apart}{base}" if scripts else base


def _script(text: str, *, up: bool) -> str:
    if not text:
        return ""
    small = shifted(text, up=up)
    return small if small != text else f"{'^' if up else '_'}{_grouped(text)}"


def _grouped(text: str) -> str:
    return text if _SIMPLE.fullmatch(text) else f"({text})"


def _shown(node: _Node, count: int) -> list[str]:
    """The first `count` elements of a node; missing ones are empty. More are part of the last."""
    found = list(map(_row, _content(node)))
    found += [""] * (count - len(found))
    return [*found[: count - 1], "".join(found[count - 1 :])]


def _named(node: _Node, name: str) -> str:
    return next((_row(part) for part in node.parts if isinstance(part, _Node) and part.name == name), "")


def _property(node: _Node, group: str, name: str, default: str) -> str:
    """A property of an OMML element."""
    for part in node.parts:
        if isinstance(part, _Node) and part.name == group:
            for inner in part.parts:
                if isinstance(inner, _Node) and inner.name == name:
                    return inner.values.get("val", "")
    return default


def _of_word(node: _Node) -> str:
    """A base with an index, a power or both."""
    return _with_scripts(_named(node, "e"), _named(node, "sub"), _named(node, "sup"))


def _prescripted_of_word(node: _Node) -> str:
    return _with_prescripts(_with_scripts("", _named(node, "sub"), _named(node, "sup")), _named(node, "e"))


def _limit(node: _Node, *, up: bool) -> str:
    return _named(node, "e") + _script(_named(node, "lim"), up=up)


def _accented(node: _Node) -> str:
    return _grouped(_named(node, "e")) + _property(node, "accPr", "chr", "\N{COMBINING CIRCUMFLEX ACCENT}")


def _barred(node: _Node) -> str:
    above = _property(node, "barPr", "pos", "bot") == "top"
    return _grouped(_named(node, "e")) + ("\N{COMBINING OVERLINE}" if above else "\N{COMBINING LOW LINE}")


def _equations(node: _Node) -> str:
    # & aligns the equations, and is not shown.
    rows = (" ".join(row.replace("&", " ").split()) for row in map(_row, node.parts))
    return "; ".join(filter(None, rows))


def _sum(node: _Node) -> str:
    sign = _property(node, "naryPr", "chr", "\N{INTEGRAL}")
    return _with_scripts(sign, _named(node, "sub"), _named(node, "sup")) + " " + _named(node, "e")


def _root_of_word(node: _Node) -> str:
    return _script(_named(node, "deg"), up=True) + "\N{SQUARE ROOT}" + _grouped(_named(node, "e"))


def _brackets(node: _Node) -> str:
    inner = [part for part in node.parts if isinstance(part, _Node) and part.name == "e"]
    first, last = (_property(node, "dPr", name, default) for name, default in (("begChr", "("), ("endChr", ")")))
    return _enclosed(first, _property(node, "dPr", "sepChr", "|"), inner, last)


def _enclosed(first: str, separator: str, inner: Sequence[_Node | str], last: str) -> str:
    """Parts in brackets."""
    if (first, len(inner), last) == ("(", 1, ")") and _is_stack(stack := _sole(inner[0])):
        return _row(_Node(_BINOMIAL, {}, [stack]))
    return first + separator.join(map(_row, inner)) + last


def _function(node: _Node) -> str:
    return f"{_named(node, 'fName')} {_named(node, 'e')}"


def _table(node: _Node) -> str:
    return f"[{'; '.join(filter(None, map(_row, node.parts)))}]"


def _cells(node: _Node) -> str:
    return ", ".join(map(_row, node.parts))


def _scripted(node: _Node, *, up: bool) -> str:
    base, script = _shown(node, 2)
    return base + _script(script, up=up)


def _twice_scripted(node: _Node) -> str:
    base, sub, sup = _shown(node, 3)
    return _with_scripts(base, sub, sup)


def _multiscripted(node: _Node) -> str:
    texts = list(map(_row, node.parts)) or [""]
    names = ["" if isinstance(part, str) else part.name for part in node.parts]
    end = names.index("mprescripts") if "mprescripts" in names else len(texts)
    after, before = (
        _with_scripts("", ", ".join(filter(None, pairs[::2])), ", ".join(filter(None, pairs[1::2])))
        for pairs in (texts[1:end], texts[end + 1 :])
    )
    return _with_prescripts(before, texts[0] + after)


def _root(node: _Node) -> str:
    base, index = _shown(node, 2)
    return _script(index, up=True) + "\N{SQUARE ROOT}" + _grouped(base)


def _fenced(node: _Node) -> str:
    separators = "".join(node.values.get("separators", ",").split()) or " "
    return _enclosed(node.values.get("open", "("), separators[0], node.parts, node.values.get("close", ")"))


_FORMS: dict[str, Callable[[_Node], str]] = {
    _BINOMIAL: _binomial,
    # OMML.
    "f": _fraction,
    **dict.fromkeys(("sSub", "sSup", "sSubSup"), _of_word),
    "sPre": _prescripted_of_word,
    "limLow": partial(_limit, up=False),
    "limUpp": partial(_limit, up=True),
    "acc": _accented,
    "bar": _barred,
    "eqArr": _equations,
    "nary": _sum,
    "rad": _root_of_word,
    "d": _brackets,
    "func": _function,
    "m": _table,
    "mr": _cells,
    # MathML.
    "mfrac": _fraction,
    **dict.fromkeys(("msub", "munder"), partial(_scripted, up=False)),
    **dict.fromkeys(("msup", "mover"), partial(_scripted, up=True)),
    **dict.fromkeys(("msubsup", "munderover"), _twice_scripted),
    "msqrt": lambda node: "\N{SQUARE ROOT}" + _grouped(_joined(node)),
    "mmultiscripts": _multiscripted,
    "mroot": _root,
    "mfenced": _fenced,
    "mtable": _table,
    **dict.fromkeys(("mtr", "mlabeledtr"), _cells),
}
