"""From token ids to text: whole UTF-8 characters only, cut at stop strings, one token at a time.

What is emitted depends on the tokens alone, never on how they were grouped into rounds.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable


class StopStrings:
    """Finds the first completed stop string in a growing text, holding back what may still become one."""

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops` are not empty strings."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text. Returns what may be emitted now, and whether a stop string was completed (it is not emitted)."""
        if not self._stops:
            return text, False
        self._held += text
        # The stop that ends first wins, the longer one if two end together: independent of where pieces were cut.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)
            emit, self._held = self._held[:at], ""
            return emit, True
        keep = self._pending()
        emit, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return emit, False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _pending(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class Text:
    """The answer of one sequence as it grows.

    Attributes:
        tokens: emitted ids, without the one that ended the text.
        pieces: emitted text, in pieces.
        stop_reason: None while growing, then "length", "eos", "stop" or "interrupted".
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, limit: int, eos: Container[int] = (), stops: Iterable[str] = ()
    ) -> None:
        """`token_bytes` gives the bytes an id stands for; `limit` is the most tokens the text may have."""
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.stop_reason: str | None = None
        self._token_bytes = token_bytes
        self._limit = limit
        self._eos = eos
        self._stops = StopStrings(stops)
        # Holds back the bytes of an unfinished character; bytes that can never become one turn into U+FFFD.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the tokens of a round and returns the text to emit. Tokens after the end are dropped."""
        piece = ""
        for token in tokens:
            if token in self._eos:
                piece += self._end("eos")
                break
            emit, stopped = self._stops.push(self._utf8.decode(self._token_bytes(token)))
            piece += emit
            if stopped:
                self._end("stop")
                break
            self.tokens.append(token)
            if len(self.tokens) == self._limit:
                piece += self._end("length")
                break
        if piece:
            self.pieces.append(piece)
        return piece

    def interrupt(self) -> str:
        """Ends a text that is still growing; returns what was held back."""
        if self.stop_reason is not None:
            return ""
        piece = self._end("interrupted")
        if piece:
            self.pieces.append(piece)
        return piece

    def _end(self, why: str) -> str:
        self.stop_reason = why
        # An unfinished character is dropped: half a character is no text. Its tokens remain in `tokens`.
        self._utf8.reset()
        return self._stops.flush()
