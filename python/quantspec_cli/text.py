"""From token ids to text: whole UTF-8 characters, without a thinking block, cut at stop strings, one token at a time.

The emitted text depends on the tokens alone, not on their grouping into rounds.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence


class StopStrings:
    """Finds the first completed stop string in a growing text; holds back text that may be the start of one."""

    def __init__(self, stops: Iterable[str]) -> None:
        """`stops` must contain no empty string."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text. Returns the text to emit, and True if a stop string was completed (it is not emitted)."""
        if not self._stops:
            return text, False
        self._held += text
        # The stop string that ends first wins, the longer one if two end together: independent of piece borders.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)
            emit, self._held = self._held[:at], ""
            return emit, True
        emit, self._held = _split_pending(self._held, self._stops)
        return emit, False

    def flush(self) -> str:
        """The held-back text, at the end of the text."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class Thinking:
    """How a model marks thinking before its answer.

    Attributes:
        opens: the tag before the block.
        closes: the tag after it.
        begun: the prompt ends inside the block, so the answer has no opening tag.
        on: the model may think; otherwise its answer is not searched for a block.
        expected: the chat template has the tags or a switch. Otherwise only the tokenizer has the tags: models that answer at
            once may share it with models that think.
    """

    opens: str = "<think>"
    closes: str = "</think>"
    begun: bool = False
    on: bool = True
    expected: bool = True

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that an answer may have."""
        return (self.opens, self.closes) if self.on else ()


class ThinkingBlock:
    """Separates the thinking block at the start of a growing text from the answer after it."""

    def __init__(self, thinking: Thinking) -> None:
        self._opens, self._closes = thinking.opens, thinking.closes
        self._place: Literal["before", "inside", "after", "answer"] = "inside" if thinking.begun else "before"
        self._found = thinking.begun
        self._thoughts: list[str] = []
        self._held = ""

    @property
    def thinking(self) -> str | None:
        """The block's text so far, stripped of line breaks at its ends; None if the text did not begin with a block."""
        return "".join(self._thoughts).strip("\n") if self._found else None

    @property
    def open(self) -> bool:
        """True between the block's tags."""
        return self._place == "inside"

    def push(self, text: str) -> str:
        """Adds text. Returns the part known to belong to the answer, without the line breaks after the block."""
        self._held += text
        if self._place == "before":
            start = self._held.lstrip()
            if start.startswith(self._opens):
                self._place, self._found, self._held = "inside", True, start[len(self._opens) :]
            elif self._opens.startswith(start):
                return ""
            else:
                self._place = "answer"
        if self._place == "inside":
            thought, closed, rest = self._held.partition(self._closes)
            if not closed:
                thought, self._held = _split_pending(self._held, (self._closes,))
                self._thoughts.append(thought)
                return ""
            self._thoughts.append(thought)
            self._place, self._held = "after", rest
        if self._place == "after":
            self._held = self._held.lstrip("\n")
            if not self._held:
                return ""
            self._place = "answer"
        answer, self._held = self._held, ""
        return answer

    def flush(self) -> str:
        """The held-back part of the answer, at the end of the text. An unfinished block is not an answer."""
        held, self._held = self._held, ""
        if self._place == "inside":
            self._thoughts.append(held)
            return ""
        return held


def _split_pending(text: str, words: Sequence[str]) -> tuple[str, str]:
    """Splits before the longest end of the text that is a proper prefix of one of the words."""
    longest = min(len(text), max(map(len, words)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(word.startswith(end) for word in words):
            return text[:-length], end
    return text, ""


class Text:
    """The answer of one sequence as it grows.

    Attributes:
        tokens: emitted ids, including those of a thinking block, without the one that ended the text.
        pieces: emitted text, in pieces.
        stop_reason: None while growing, then "length", "eos", "stop" or "interrupted".
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        limit: int,
        eos: Container[int] = (),
        stops: Iterable[str] = (),
        thinking: Thinking | None = None,
    ) -> None:
        """`token_bytes` gives the bytes of an id; `limit` is the most tokens of the text. Stop strings are searched after
        the block that `thinking` describes.
        """
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.stop_reason: str | None = None
        self._token_bytes = token_bytes
        self._limit = limit
        self._eos = eos
        self._stops = StopStrings(stops)
        self._block = ThinkingBlock(thinking) if thinking is not None and thinking.on else None
        # Holds back the bytes of an unfinished character; invalid bytes become U+FFFD.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)

    @property
    def thinking(self) -> str | None:
        """The thinking block so far; None if the answer has none."""
        return None if self._block is None else self._block.thinking

    @property
    def thinks(self) -> bool:
        """True if the thinking block is not closed so far."""
        return self._block is not None and self._block.open

    def push(self, tokens: Iterable[int]) -> str:
        """Adds the tokens of a round and returns the text to emit. Tokens after the end are dropped."""
        piece, why = "", None
        for token in tokens:
            if token in self._eos:
                why = "eos"
                break
            text = self._utf8.decode(self._token_bytes(token))
            emit, stopped = self._stops.push(text if self._block is None else self._block.push(text))
            piece += emit
            if stopped:
                why = "stop"
                break
            self.tokens.append(token)
            if len(self.tokens) == self._limit:
                why = "length"
                break
        return self._extended(piece, why)

    def interrupt(self) -> str:
        """Ends an unfinished text; returns the held-back text."""
        return self._extended("", "interrupted") if self.stop_reason is None else ""

    def _extended(self, piece: str, why: str | None) -> str:
        """Adds a piece, and the held-back text if the text ends. Returns what was added."""
        if why is not None:
            # An unfinished character is dropped; its tokens remain in `tokens`.
            self._utf8.reset()
            if self._block is not None:
                rest, stopped = self._stops.push(self._block.flush())
                piece += rest
                why = "stop" if stopped else why
            piece += self._stops.flush()
        if piece:
            self.pieces.append(piece)
        # Last: another thread that reads the reason finds the whole text.
        self.stop_reason = why
        return piece
