"""The draft-verify loop: the algorithm of the method, as one page.

A round drafts γ tokens with 4-bit weights and the upper nibbles of the cache, verifies them with one pass of the full
weights over both nibbles, and emits the accepted ones and one more of the target. γ = 0 is plain decoding.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from .text import Text


class Decoder(Protocol):
    """What the loop asks of an engine; `_native.Engine` says what each does."""

    def prefill(self, slot: int, on_progress: Callable[[int, int], object] | None, /) -> int:
        """Processes the slot's prompt and returns the first new token."""

    def choose_gamma(self, slot: int, /) -> int:
        """The γ of the slot's next round."""

    def draft(self, gammas: Sequence[tuple[int, int]], /) -> None:
        """Drafts γ tokens for every (slot, γ)."""

    def verify(self) -> list[tuple[int, list[int]]]:
        """Verifies them: per slot what it emits."""

    def finish(self, slot: int, /) -> None:
        """Frees the slot."""


class Piece(NamedTuple):
    """Text one sequence emitted: by its prefill or in one round. May be empty."""

    slot: int
    text: str


def decode(
    engine: Decoder,
    texts: Mapping[int, Text],
    *,
    choose_gamma: Callable[[int], int] | None = None,
    finish: Callable[[int], object] | None = None,
    on_prefill: Callable[[int, int], object] | None = None,
    turn: AbstractContextManager[object] | None = None,
) -> Generator[Piece, None, None]:
    """Decodes the sequences in `texts` (slot to answer) together until every text has ended; frees their slots.

    `choose_gamma` replaces the engine's policy, and `finish` what frees a slot. `on_prefill` is told rows done and rows in
    all of the prompt under way.
    `turn` is held for a prefill and for a round, so that threads which share the engine do not enter each other's.
    """
    choose_gamma = choose_gamma or engine.choose_gamma
    finish = finish or engine.finish
    turn = turn or nullcontext()
    running = dict(texts)
    try:
        for slot in list(running):
            with turn:
                first = engine.prefill(slot, on_prefill)
            yield _emit(finish, running, slot, [first])
        while running:
            with turn:
                engine.draft([(slot, choose_gamma(slot)) for slot in running])
                emitted = engine.verify()
            for slot, tokens in emitted:
                yield _emit(finish, running, slot, tokens)
    finally:
        for slot in running:
            finish(slot)


def _emit(finish: Callable[[int], object], running: dict[int, Text], slot: int, tokens: list[int]) -> Piece:
    """Hands tokens to the slot's text; a text that ends leaves the batch."""
    piece = Piece(slot, running[slot].push(tokens))
    if running[slot].stop_reason is not None:
        del running[slot]
        finish(slot)
    return piece
