"""Repeated answers after the same texts, as `bench` and `eval --decode` measure them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .. import loop
from ..errors import InternalError
from ..text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .. import _native
    from ..model import Model

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Answers:
    """Decodes repeatedly after the same texts, whose prefill is kept as long as the buffer allows.

    Attributes:
        depths: tokens of text before the answer of each sequence.
        tokens: of each answer.
        passes: verifications of the last run, over all its sequences together.
        draft_steps: draft steps of the last run, likewise.
    """

    def __init__(
        self,
        engine: _native.Engine,
        model: Model,
        ids: Sequence[int],
        depth: int,
        tokens: int,
        *,
        batch: int,
        ragged: bool = False,
        on_prefill: Callable[[int, int], object] | None = None,
    ) -> None:
        """Prefills. At depth 0 there is one token of text, as the first decoded token needs a predecessor. If `ragged`, the
        i-th of N sequences has i/N of the depth.
        """
        shares = range(1, batch + 1) if ragged else [batch] * batch
        self.depths, self.tokens = [max(depth * share // batch, 1) for share in shares], tokens
        self.passes = self.draft_steps = 0
        self._engine, self._model = engine, model
        self._on_prefill = on_prefill
        self._seed = 0
        # Each sequence begins elsewhere in the text, after the same first token, often a BOS.
        self._texts: dict[int, Sequence[int]] = {}
        for sequence, own in enumerate(self.depths):
            start = 1 + sequence * (len(ids) - 1) // batch
            text = [*ids[:1], *ids[start:], *ids[1:start]][: own + 1]
            self._texts[self._prefilled(text)] = text

    def run(self, seed: int, tokens: int | None = None) -> tuple[float, list[list[int]]]:
        """Decodes in the rounds of `quantspec run`, from the text's own next token on, until an answer has all its tokens.

        Every round thus has all sequences. Returns seconds and the tokens that each sequence emitted.
        """
        self._seed = seed
        self.passes = self.draft_steps = 0
        # The given token counts as an answer's first.
        limit = (tokens or self.tokens) + 1
        answers = {slot: Text(self._model.tokenizer.token_bytes, limit=limit) for slot in self._texts}
        pieces = loop.decode(self, answers)
        for _ in self._texts:
            next(pieces)
        started = time.perf_counter()
        while all(answer.stop_reason is None for answer in answers.values()):
            for _ in self._texts:  # one piece of each sequence a round
                next(pieces)
        seconds = time.perf_counter() - started
        pieces.close()
        return seconds, [answer.tokens[1:] for answer in answers.values()]

    def warm_up(self, seed: int, tokens: int) -> None:
        """Decodes at least `tokens` tokens of each run's longest answer, in as many answers as they take."""
        for done in range(0, tokens, self.tokens):
            self.run(seed, min(self.tokens, tokens - done))

    def close(self) -> None:
        """Frees the slots."""
        for slot in self._texts:
            self._engine.finish(slot)

    # The interface that the loop uses.

    def prefill(self, slot: int, _on_progress: object = None) -> int:
        """Returns to the end of the text, with a new prefill if too much was decoded."""
        text = self._texts[slot]
        if not self._engine.restart(slot, text[-1], seed=self._seed, **SAMPLING):
            self._engine.finish(slot)
            if self._prefilled(text) != slot or not self._engine.restart(slot, text[-1], seed=self._seed, **SAMPLING):
                raise InternalError("a freshly prefilled prompt cannot be decoded", "please report this")
        return text[-1]

    def choose_gamma(self, slot: int) -> int:
        """The engine's γ."""
        return self._engine.choose_gamma(slot)

    def draft(self, gammas: Sequence[tuple[int, int]]) -> None:
        """Drafts by the engine; counts the draft steps."""
        self.draft_steps += max(gamma for _, gamma in gammas)
        self._engine.draft(gammas)

    def verify(self) -> list[tuple[int, list[int]]]:
        """Verifies by the engine; counts the passes."""
        self.passes += 1
        return self._engine.verify()

    def finish(self, slot: int) -> None:
        """Keeps the slot for the next run."""

    def _prefilled(self, text: Sequence[int]) -> int:
        slot = self._engine.add(text[:-1], seed=0, max_new_tokens=self.tokens + 1, **SAMPLING)
        self._engine.prefill(slot, self._on_prefill)
        return slot
