"""Filled-in fields and typed notes of a PDF: annotations, which are not part of a page's own text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pypdf import PageObject

# Flags of buttons.
_RADIO = 1 << 15
_PUSH_BUTTON = 1 << 16
# Bound of the fields above a widget, which form a circle in some damaged files.
_DEPTH_MAX = 32
# Bound of all values together, in characters: a small file may refer to one long text very often.
_LENGTH_MAX = 1 << 26
_LINE_END = re.compile("\r\n?")


class Form:
    """The annotations of a document, of which each value is read once."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        """`warn` is called with a message for each annotation whose text is missing."""
        self._warn = warn
        # Where the values read so far are stored: several widgets may show the value of one field.
        self._read: set[object] = set()
        self._left = _LENGTH_MAX

    def texts(self, page: PageObject) -> Iterator[str]:
        """The values of a page that no page before it shows."""
        # Damaged annotations are no error of the page's own text.
        try:
            annotations = page.annotations or ()
        except Exception as error:
            self._warn(f"its form fields and notes cannot be read ({type(error).__name__})")
            return
        for reference in annotations:
            try:
                annotation: Any = reference.get_object()
                text = self._text(annotation) if isinstance(annotation, dict) else ""
            except Exception as error:
                self._warn(f"a form field or note cannot be read ({type(error).__name__})")
                continue
            if len(text) > self._left:
                self._warn(f"form fields and notes of more than {_LENGTH_MAX} characters are not read")
            elif text:
                self._left -= len(text)
                yield text

    def _text(self, annotation: Any) -> str:
        subtype = _entry(annotation, "/Subtype")
        if subtype == "/FreeText":
            return self._value([annotation], "/Contents")
        if subtype != "/Widget":
            return ""
        levels = _levels(annotation)
        _, kind = _inherited(levels, "/FT")
        if kind == "/Btn":
            return self._chosen(levels)
        return self._value(levels, "/V") if kind in ("/Tx", "/Ch") else ""

    def _value(self, levels: Sequence[Any], key: str) -> str:
        """A text, or the chosen texts of a list."""
        owner, value = _inherited(levels, key)
        if value is None or not self._is_new(owner):
            return ""
        parts = [value]
        if isinstance(value, list):
            # A list that many fields refer to is read once, as it may be long.
            parts = [part.get_object() for part in value] if self._is_new(value) else []
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            self._warn("the value of a form field or note is not text")
        # Repeated parts are left out before they are copied, for the same reason.
        return ", ".join(filter(None, (_LINE_END.sub("\n", text).strip() for text in dict.fromkeys(texts))))

    def _chosen(self, levels: Sequence[Any]) -> str:
        """A check box or radio button that is chosen, with its field's description or name; "" for others."""
        state = _entry(levels[0], "/AS")
        _, flags = _inherited(levels, "/Ff")
        flags = flags if isinstance(flags, int) else 0
        if not isinstance(state, str) or state == "/Off" or flags & _PUSH_BUTTON:
            return ""
        # A field further up has the name of a group of fields, so the nearest name counts.
        owner, name = _inherited(levels, "/TU", "/T")
        if name is None or not self._is_new(owner, state):
            return ""
        if not isinstance(name, str):
            self._warn("the name of a chosen box is not text")
            return ""
        return f"\N{BALLOT BOX WITH X} {name}" + (f": {state.removeprefix('/')}" if flags & _RADIO else "")

    def _is_new(self, owner: Any, state: str = "") -> bool:
        """True the first time for a value, or a button's state, that is stored in this object."""
        place = getattr(owner, "indirect_reference", None)
        if place is None:  # part of the annotation, so no other one can refer to it
            return True
        before = len(self._read)
        self._read.add((place, state))
        return len(self._read) > before


def _levels(widget: Any) -> list[Any]:
    """A widget and the fields above it, from which it inherits."""
    levels: list[Any] = []
    level = widget
    while isinstance(level, dict) and len(levels) < _DEPTH_MAX:
        levels.append(level)
        level = _entry(level, "/Parent")
    return levels


def _inherited(levels: Sequence[Any], *keys: str) -> tuple[Any, Any]:
    """The nearest object with one of these entries, and the first of these in it; empty texts count as absent."""
    for level in levels:
        for key in keys:
            entry = _entry(level, key)
            if entry not in (None, ""):
                return level, entry
    return None, None


def _entry(of: Any, key: str) -> Any:
    """A dictionary's entry, which may be a reference to an object; None if it is absent or null."""
    from pypdf.generic import NullObject

    entry = of.get(key)
    entry = None if entry is None else entry.get_object()
    return None if isinstance(entry, NullObject) else entry
