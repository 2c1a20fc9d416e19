"""Lower bound of a text's token count without encoding it. A prompt far beyond the context is thus refused before the
library takes over 100 bytes of memory per character.

Tokens split the bytes of a text into pieces, each an entry of the vocabulary. Two lower bounds follow from the vocabulary
alone, for any merges and any word splitting:

* *Borders.* If no entry contains two given bytes side by side, a token border lies between them.
* *Shares.* If the longest entry with a given character has n characters, that character is at least 1/n of a token. (A
  character counts by the first byte of its UTF-8, since entries may hold parts of characters.)

The first is close (nine tenths) for prose and code with spaces between words; the second helps with Chinese or Japanese.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from . import sentencepiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import tokenizers
    from tokenizers.models import BPE

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Characters looked at together.
_SLICE = 1 << 16
# UTF-8 bytes that do not begin a character.
_CONTINUE = bytes(range(0x80, 0xC0))


class LowerBound:
    """The two numbers for one tokenizer."""

    def __init__(
        self, entries: Iterable[bytes], stripping: list[str], utf8: Callable[[str], bytes], *, composes: bool
    ) -> None:
        """`entries` are the texts of all tokens, and `utf8` encodes a text like them. `stripping` tokens absorb white space
        around them. `composes`: the text is normalised to NFC.
        """
        self._together: set[tuple[int, int]] = set()
        self._longest = [0] * 256
        for entry in entries:
            self._together.update(pairwise(entry))
            starts = entry.translate(None, _CONTINUE)
            for byte in starts:
                self._longest[byte] = max(self._longest[byte], len(starts))
        self._stripping = stripping
        self._utf8 = utf8
        self._composes = composes

    def tokens(self, text: str, enough: int) -> int:
        """A lower bound of the text's token count. Counting stops at `enough`."""
        if any(token in text for token in self._stripping):
            return 0
        if self._composes and not unicodedata.is_normalized("NFC", text):
            # Up to four characters become one.
            return len(text) // (4 * max(self._longest))
        borders, shares = 1, 0.0
        for start in range(0, len(text), _SLICE):
            raw = self._utf8(text[start : start + _SLICE])
            borders += sum(pair not in self._together for pair in pairwise(raw))
            counts = Counter(raw).items()
            shares += sum(count / self._longest[byte] for byte, count in counts if self._longest[byte])
            if max(borders, int(shares)) >= enough:
                break
        return max(borders, int(shares))


def of(inner: tokenizers.Tokenizer, byte_level: Callable[[str], bytes]) -> LowerBound | None:
    """The bound for a tokenizer; None if its tokens may skip some of a text. `byte_level` decodes the tokens of a byte-level
    vocabulary.
    """
    model = plain_bpe(inner)
    if model is None:
        return None
    normalizers, splits = list(steps(inner.normalizer)), list(steps(inner.pre_tokenizer))
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    if not all(_keeps_text(step, is_byte_level) for step in normalizers + splits):
        return None
    spell, utf8 = (byte_level, str.encode) if is_byte_level else (_sentencepiece, _with_spaces)
    entries = {spell(token) for token in inner.get_vocab(with_added_tokens=True)}
    # Every byte has a token, so nothing is skipped, and no run of unknown characters becomes one token.
    if not (is_byte_level or model.byte_fallback) or not entries.issuperset(bytes([byte]) for byte in range(256)):
        return None
    added = inner.get_added_tokens_decoder().values()
    # Tokens marked as normalised are matched with a space before them.
    entries.update(space + utf8(token.content) for token in added for space in (b"", b" "))
    return LowerBound(
        entries,
        [token.content for token in added if token.lstrip or token.rstrip],
        utf8,
        composes=any(step["type"] == "NFC" for step in normalizers),
    )


def plain_bpe(inner: tokenizers.Tokenizer) -> BPE | None:
    """The model of a tokenizer, if it is BPE that adds no marks to parts of a word."""
    from tokenizers.models import BPE

    model = inner.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    return model


def steps(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normaliser or pre-tokenizer, as tokenizer.json describes them."""
    if component is not None:
        yield from _flat(json.loads(component.__getstate__()))


def _flat(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = step.get("normalizers") or step.get("pretokenizers")
    if inner is None:
        yield step
    else:
        for part in inner:
            yield from _flat(part)


def _keeps_text(step: dict[str, Any], is_byte_level: bool) -> bool:
    """True if a step preserves a text, except for composing characters, ▁ for spaces and one ▁ before the text."""
    match step:
        case {"type": "NFC" | "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case (
            {"type": "Prepend", "prepend": space}
            | {"type": "Replace", "pattern": {"String": " "}, "content": space}
            | {"type": "Metaspace", "replacement": space}
        ):
            return not is_byte_level and bool(space == SPACE)
    return False


def _sentencepiece(token: str) -> bytes:
    return sentencepiece.byte_of(token) or _with_spaces(token)


def _with_spaces(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()
