"""The draft-verify loop: the algorithm of the method, as one page.

A round drafts γ tokens, by default with 4-bit weights and the upper nibbles of the cache. It verifies them with one pass
of the full weights over both nibbles, and emits the accepted tokens and one more of the target. γ = 0 is plain decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from .text import Text


class Decoder(Protocol):
    """The part of an engine that the loop uses; documented in `_native.Engine`."""

    def prefill(self, slot: int, on_progress: Callable[[int, int], object] | None = None, /) -> int:
        """Processes the slot's prompt and returns the first new token."""

    def choose_gamma(self, slot: int, /) -> int:
        """The γ of the slot's next round."""

    def draft(self, gammas: Sequence[tuple[int, int]], /) -> None:
        """Drafts γ tokens for every (slot, γ)."""

    def verify(self) -> list[tuple[int, list[int]]]:
        """Verifies the drafts: per slot the emitted tokens."""

    def finish(self, slot: int, /) -> None:
        """Frees the slot."""


def run_round(
    engine: Decoder, slots: Sequence[int], choose_gamma: Callable[[int], int] | None = None
) -> list[tuple[int, list[int]]]:
    """One round of these sequences; per slot the tokens it emits, at least one. `choose_gamma` overrides the policy's γ."""
    choose_gamma = choose_gamma or engine.choose_gamma
    engine.draft([(slot, choose_gamma(slot)) for slot in slots])
    return engine.verify()


def decode(
    engine: Decoder, texts: Mapping[int, Text], *, choose_gamma: Callable[[int], int] | None = None
) -> Generator[str, None, None]:
    """Decodes the sequences in `texts` (slot to answer) together until all have ended; yields pieces, frees slots.

    For callers with an engine of their own; with `scheduler.Scheduler` sequences join and leave at any time.
    """
    running = dict(texts)
    try:
        for slot in texts:
            yield _push(engine, running, slot, [engine.prefill(slot)])
        while running:
            for slot, tokens in run_round(engine, list(running), choose_gamma):
                yield _push(engine, running, slot, tokens)
    finally:
        for slot in running:
            engine.finish(slot)


def _push(engine: Decoder, running: dict[int, Text], slot: int, tokens: Sequence[int]) -> str:
    """Appends tokens to the slot's text; a text that ends leaves the batch."""
    piece = running[slot].push(tokens)
    if running[slot].stop_reason is not None:
        del running[slot]
        engine.finish(slot)
    return piece
