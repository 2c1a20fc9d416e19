"""The size of an engine for many prompts: as many sequences at once as memory holds, which share its pages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from .errors import DoesNotFitError, native_errors
from .predict import PAGE_TOKENS
from .signals import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from . import _native
    from .model import Model
    from .options import EngineOptions

    # `model.planned` of a model, options and a device.
    PlanOf = Callable[..., dict[str, Any]]

# Most documents, or parts of one, that decode together with `--parallel auto`, by device. More gain little for their memory:
# on a GPU 64 sequences of 4,096 tokens decode 13 % more tokens/s than 32 (docs/benchmarks.md). Memory may allow fewer.
PARALLEL = {"cpu": 16, "cuda": 32}


class BeyondMemoryError(DoesNotFitError):
    """A document needs more memory than there is here and now: unlike other failures, this one is not remembered."""


class Opening:
    """Opens a device on a thread of its own, once for all plans and the engine."""

    def __init__(self, model: Model, options: EngineOptions) -> None:
        from . import _native

        work = ThreadPoolExecutor(1)
        self._device = [work.submit(_native.open_device, str(model.directory), device=options.device)]
        work.shutdown(wait=False)

    def check(self) -> None:
        """Raises the error of a device that could not be opened, if that is known."""
        if self._device[0].done():
            with native_errors():
                self._device[0].result()

    def take(self) -> _native.OpenDevice:
        """The device, when it is open. It is closed with the last reference, so keep it until the engine is open."""
        opening = self._device.pop()
        while not opening.done():
            wait([opening], WAIT_S)
        with native_errors():
            return opening.result()


def together(plan_of: PlanOf, context: int, lengths: Sequence[int], most: int) -> tuple[int, int]:
    """The number of slots, at most `most`, and the tokens of the pool, that let most sequences decode at once.

    `lengths` are the tokens of all sequences, prompt and answer, each at most `context`. Sequences wait for a slot and for
    pages, so the pool may be smaller than the longest sequences together.
    """
    sizes = sorted(map(_pages, lengths), reverse=True)
    best, most_held = (1, _pages(context)), 1
    for slots in range(min(most, len(sizes)), 1, -1):
        pool = _fitting(plan_of, context, slots, sum(sizes[:slots]))
        # On average.
        held = min(slots, pool * len(sizes) // sum(sizes))
        if held > most_held:
            best, most_held = (slots, pool), held
        if most_held >= slots - 1:
            break
    return best


def _pages(tokens: int) -> int:
    """Tokens of a text that are in whole pages, at least one page; the buffer holds the rest."""
    return max(tokens // PAGE_TOKENS, 1) * PAGE_TOKENS


def _fitting(plan_of: PlanOf, context: int, slots: int, pool: int) -> int:
    """The largest pool up to `pool` with which an engine of these slots fits; 0 if the smallest does not."""
    least = _pages(context)
    large = plan_of(context=context, batch=slots, pool=pool)
    if large["fits"]:
        return pool
    small = plan_of(context=context, batch=slots, pool=least)
    if not small["fits"] or pool <= least:
        return 0
    # Memory grows evenly with the pages.
    per_token = (large["planned_bytes"] - small["planned_bytes"]) / (pool - least)
    return least + int((small["available_bytes"] - small["planned_bytes"]) / per_token) // PAGE_TOKENS * PAGE_TOKENS
