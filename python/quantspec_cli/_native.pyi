"""Types of the native module: the whole door between Python and the engine. Token ids and numbers only, no text."""

from collections.abc import Callable, Sequence
from typing import Any, final

class NativeError(Exception):
    """Any error of the engine but an interrupt, which arrives as KeyboardInterrupt."""

    kind: str
    message: str
    hint: str

@final
class Engine:
    """One model on one device with room for `slots` sequences of up to `capacity` tokens each.

    Long calls release the GIL and run pending signal handlers, so Ctrl-C ends them within 0.3 s. Callbacks are called
    with (done, total), at most every 50 ms.
    """

    def __new__(
        cls,
        model: str,
        *,
        capacity: int,
        device: str = "auto",
        threads: int | None = None,
        kv_target: str = "int8",
        method: str = "quantspec",
        kv_rounding: str = "balanced",
        draft_weights: str = "int4",
        draft_pages: int | None = None,
        page_choice: str = "best",
        accept: str = "replay",
        gamma: int | None = None,
        slots: int = 1,
        on_loading: Callable[[int, int], object] | None = None,
    ) -> Engine: ...
    @property
    def info(self) -> dict[str, Any]:
        """device, device_name, simd, threads, family, vocab, layers, max_positions, eos, planned_bytes, load_s."""

    def add(
        self,
        prompt: Sequence[int],
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        max_new_tokens: int,
    ) -> int:
        """Takes a prompt into a free slot and returns the slot."""

    def prefill(self, slot: int, on_progress: Callable[[int, int], object] | None = None) -> int:
        """Processes the slot's prompt and returns the first new token."""

    def choose_gamma(self, slot: int) -> int:
        """The policy's γ for the slot's next round, clipped by the tokens it may still emit."""

    def draft(self, gammas: Sequence[tuple[int, int]]) -> None:
        """Drafts γ tokens for every (slot, γ): the round consists of these slots."""

    def verify(self) -> list[tuple[int, list[int]]]:
        """Verifies what `draft` drafted: per slot the accepted tokens and one more of the target."""

    def finish(self, slot: int) -> None:
        """Frees the slot."""

    def stats(self) -> dict[str, Any]:
        """Counters, times and bytes since the engine was opened; names as in `quantspec run --json`."""

def plan(
    model: str,
    *,
    capacity: int,
    device: str = "auto",
    threads: int | None = None,
    kv_target: str = "int8",
    method: str = "quantspec",
    kv_rounding: str = "balanced",
    draft_weights: str = "int4",
    draft_pages: int | None = None,
    page_choice: str = "best",
    accept: str = "replay",
    gamma: int | None = None,
    slots: int = 1,
) -> dict[str, Any]:
    """What such an engine would take: planned_bytes, its parts, and longest_context in tokens. Loads nothing."""

def doctor() -> dict[str, Any]:
    """What this machine offers: cpu, gpu, memory_bytes, kernels."""

def model_info(path: str) -> dict[str, Any]:
    """The configuration of a checkpoint directory: family, vocab, layers, max_positions, eos and shape."""
