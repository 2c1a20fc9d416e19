"""Encodes long texts in pieces, and keeps the ids of recent ones: of a second prompt with the same document only the end is
encoded.

Pieces end with a line break, and the next one begins with a letter. In the tokenizers of `are_independent` no token covers
both, and the tokens on one side depend only on the nearest character of the other. So each piece is encoded between a line
break and a letter, and the ids of a text are those of its pieces.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from . import gguf, lower_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tokenizers

# Fewest characters of each piece but the last. If only the end of a long text is new, about this many are encoded.
LEAST_CHARACTERS = 1024
# Characters whose ids are kept: about half a million tokens, in about 25 MB.
KEPT_CHARACTERS = 1 << 21

# What is encoded before each piece but the first, and after each but the last. Some tokenizers put a space before a text,
# and the tokens of several line breaks depend on what follows.
BEFORE, AFTER = "\n", "a"
# A token that absorbs white space after it must not end where a piece may.
_ENDS = r"""\w.,;:!?"')"""
_BORDER = re.compile(rf"(?<=[{_ENDS}])[\r\n]*\n(?=[^\W\d_])")
_JOINED = re.compile(r"\n\w")

# Rules that split a text into words. No match contains a line break before a letter, and none looks further than the next
# character that is no space. Each list has a rule that matches every character.
_RULES = {rule for rules in gguf.SPLITS.values() if any(rule.endswith(r"|\s+") for rule in rules) for rule in rules}


def split(text: str) -> list[str]:
    """The pieces of a text, with `BEFORE` and `AFTER`. Texts with the same beginning have the same pieces there."""
    cuts, at = [0], LEAST_CHARACTERS
    while border := _BORDER.search(text, at):
        at = border.end()
        # A rule may split digits off first, and then the line breaks before them are at the end of a text.
        if text[at].isalpha():
            cuts.append(at)
            at += LEAST_CHARACTERS
    *inner, last = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    first, *rest = [piece + AFTER for piece in inner] + [last]
    return [first, *(BEFORE + piece for piece in rest)]


def are_independent(inner: tokenizers.Tokenizer) -> bool:
    """Whether this tokenizer's ids of a text are those of its pieces."""
    if lower_bound.plain_bpe(inner) is None:
        return False
    added = inner.get_added_tokens_decoder().values()
    for token in added:
        absorbs = token.lstrip or (token.rstrip and re.search(rf"[{_ENDS}]\Z", token.content))
        if absorbs or token.content.endswith("\n") or _JOINED.search(token.content):
            return False
    splits = list(lower_bound.steps(inner.pre_tokenizer))
    if not all(map(_is_local, [*lower_bound.steps(inner.normalizer), *splits])):
        return False
    if any(_covers(step) for step in splits):
        return True
    # Without a rule for words, any text of the vocabulary may be a token.
    if any(step["type"] == "ByteLevel" for step in splits) or not _knows_line_breaks(inner):
        return False
    return not any(map(_JOINED.search, inner.get_vocab(with_added_tokens=False)))


def _is_local(step: dict[str, Any]) -> bool:
    """True if a step of a normaliser or pre-tokenizer does not combine the end of a piece with the next piece."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return False
        case {"type": "NFC" | "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}:
            return rule in _RULES
        case (
            {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
            | {"type": "Prepend", "prepend": lower_bound.SPACE}
            | {"type": "Replace", "pattern": {"String": " "}, "content": lower_bound.SPACE}
            | {"type": "Metaspace", "replacement": lower_bound.SPACE}
        ):
            return True
    return False


def _covers(step: dict[str, Any]) -> bool:
    """True if a pre-tokenizer's step puts every character into a word."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    return step["type"] == "Split" and str(step["pattern"].get("Regex")).endswith(r"|\s+")


def _knows_line_breaks(inner: tokenizers.Tokenizer) -> bool:
    """False if a line break may become part of a run of unknown characters."""
    return any(inner.token_to_id(token) is not None for token in ("\n", "<0x0A>"))


class Kept:
    """Ids of recent pieces, by content. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._characters = 0

    def ids(self, pieces: Sequence[str], encode: Callable[[list[str]], list[list[int]]]) -> dict[str, list[int]]:
        """The ids of each piece; `encode` is called with those that are not kept, if there are any."""
        with self._lock:
            found = {piece: self._ids[piece] for piece in pieces if piece in self._ids}
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in found]
        if missing:
            found |= zip(missing, encode(missing), strict=True)
        with self._lock:
            for piece in dict.fromkeys(pieces):
                if piece not in self._ids:
                    self._ids[piece] = found[piece]
                    self._characters += len(piece)
                self._ids.move_to_end(piece)
            while self._characters > KEPT_CHARACTERS:
                oldest, _ = self._ids.popitem(last=False)
                self._characters -= len(oldest)
        return found
