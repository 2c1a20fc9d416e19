"""Types of the native module: the whole door between Python and the engine. Token ids and numbers only, no text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, final

__all__ = [
    "DRAFTS_LIMIT_BYTES",
    "PROMPTS_LIMIT_BYTES",
    "Engine",
    "NativeError",
    "doctor",
    "draft_files",
    "evaluate",
    "fitting",
    "gguf_metadata",
    "kernels",
    "methods",
    "model_info",
    "plan",
    "planned",
    "prompt_files",
    "rates",
    "sensitivity",
    "traffic",
]

DRAFTS_LIMIT_BYTES: int
"""Most bytes of the folder of draft weights: a load that writes there removes the least recently used files first."""

def draft_files(folder: str) -> list[tuple[Path, Path | None, int, float]]:
    """Files of draft weights in a folder, least recently used first: path, model (None if another version wrote the file),
    bytes, and the last use in seconds since the epoch. Other files and links are left out; a folder that is absent is empty.

    Raises:
        OSError: the folder cannot be read.
    """

PROMPTS_LIMIT_BYTES: int
"""Most bytes of a folder of prompts: a prompt that is kept there removes the least recently used files first."""

def prompt_files(folder: str) -> list[tuple[Path, Path | None, int, float]]:
    """Files of prompts in a folder, as `draft_files`."""

class NativeError(Exception):
    """Any error of the engine but an interrupt, which is what a signal's handler raised: KeyboardInterrupt for Ctrl-C."""

    kind: str
    message: str
    hint: str

@final
class Engine:
    """One model on one device with room for `slots` sequences of up to `capacity` tokens each.

    Prompts have up to `prompt_capacity` of them (None: all): prefill holds every hidden state of a prompt. Sequences share
    the pages of `pool_tokens` (None: of `slots` times `capacity`).

    Long calls release the GIL and run pending signal handlers, so Ctrl-C ends them within 0.3 s, as does any other
    exception of a handler. Callbacks are called with (done, total), at most every 50 ms; KeyboardInterrupt, SystemExit
    and what a handler raises inside a callback end the call, any other exception of it is unraisable.
    """

    def __new__(
        cls,
        model: str,
        *,
        capacity: int,
        prompt_capacity: int | None = None,
        device: str = "auto",
        threads: int | None = None,
        weights: str = "checkpoint",
        kv_target: str = "int8",
        method: str = "quantspec",
        kv_rounding: str = "balanced",
        draft_weights: str = "int4",
        draft_precision: str = "auto",
        draft_pages: int | Literal["auto"] | None = None,
        page_choice: str = "best",
        accept: str = "replay",
        gamma: int | None = None,
        slots: int = 1,
        pool_tokens: int | None = None,
        every_view: bool = False,
        draft_model: str | None = None,
        draft_cache: tuple[str, int] | None = None,
        prompt_memory: bool | None = ...,
        prompt_folder: str | None = None,
        on_loading: Callable[[int, int], object] | None = None,
    ) -> Engine:
        """`prompt_memory` keeps prompts in memory (None: on a CPU only), `prompt_folder` in a folder instead."""

    @property
    def info(self) -> dict[str, Any]:
        """What was loaded: device, device_name, simd, threads, weights, draft_precision, family, vocab, layers, max_positions, eos.

        Also block_rows (of a prefill), planned_bytes and load_s; cached_drafts, the share of the draft weights that was
        read from `draft_cache` (its folder and the least bytes kept there; None without one), and note, one line about
        trouble with it; and prompt_cache_limit_bytes, most bytes of prompts in memory (None where none are kept there).
        """

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
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        no_repeat_ngram: int = 0,
        logprobs: int | None = None,
    ) -> int:
        """Takes a prompt into a free slot and returns the slot. With `logprobs` its tokens come with log-probabilities."""

    def take_logprobs(self, slot: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Log-probabilities of the slot's tokens since the last call, each with those of the likeliest of its place."""

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens from the second on under the target's view, teacher-forced, in a free slot."""

    def has_room(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens, prompt and answer together, can be taken now."""

    def prefill(self, slot: int, on_progress: Callable[[int, int], object] | None = None) -> int:
        """Processes the slot's prompt and returns the first new token."""

    def prefill_chunk(
        self, slot: int, most_rows: int, on_progress: Callable[[int, int], object] | None = None
    ) -> int | None:
        """Goes on with the slot's prompt for about so many rows, counted over all layers; the first new token at its end.

        One prompt at a time; rounds of other slots may run between its chunks.
        """

    def prefill_timed(
        self, slot: int, rows_from: int, on_progress: Callable[[int, int], object] | None = None
    ) -> tuple[int, float]:
        """`prefill`, and the seconds that the prompt's rows from `rows_from` on took."""

    def configure(
        self,
        *,
        method: str = "quantspec",
        kv_target: str = "int8",
        draft_pages: int | Literal["auto"] | None = None,
        page_choice: str = "best",
        gamma: int | None = None,
    ) -> None:
        """Changes the method of an engine opened with `every_view`; policy and statistics begin anew."""

    def restart(
        self,
        slot: int,
        token: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
    ) -> bool:
        """Begins the slot's answer anew over its prompt's cache, with `token` as its first.

        False, and nothing changed, where more was decoded than the buffer holds: prefill again.
        """

    def choose_gamma(self, slot: int) -> int:
        """The policy's γ for the slot's next round, clipped by the tokens it may still emit."""

    def draft(self, gammas: Sequence[tuple[int, int]]) -> None:
        """Drafts γ tokens for every (slot, γ), fewer where γ is automatic and in doubt or the method proposes fewer.

        The round is of these slots.
        """

    def verify(self) -> list[tuple[int, list[int]]]:
        """Verifies what `draft` drafted: per slot the accepted tokens and one more of the target."""

    def read_gb_per_s(self) -> float:
        """How fast the engine's device reads memory now, in 10⁹ bytes a second. Takes less than 0.3 s."""

    def finish(self, slot: int) -> None:
        """Frees the slot."""

    def prompt_note(self) -> str | None:
        """One line about trouble with the prompt cache since the last call, each told once; None where there was none."""

    def stats(self) -> dict[str, Any]:
        """Counters, times and bytes since opening or `configure`; names as in `quantspec run --json`."""

def doctor() -> dict[str, Any]:
    """What this machine offers: cpu, gpu, memory_bytes, kernels."""

def gguf_metadata(path: str) -> dict[str, Any]:
    """Metadata of a GGUF file whose keys begin with "tokenizer.": texts, numbers, and lists of them."""

def methods() -> list[dict[str, Any]]:
    """Every method by name: about (what drafts), and the other fields of `options.Method`."""

def model_info(path: str, *, described: bool = False) -> dict[str, Any]:
    """The configuration of a checkpoint, a directory or a GGUF file: family, vocab, layers, max_positions, eos and shape.

    `described`: of a directory config.json alone is looked at, and weights may be absent.
    """

def evaluate(
    model: str,
    tokens: Sequence[int],
    *,
    context: int = 0,
    device: str = "auto",
    threads: int | None = None,
    weights: str = "checkpoint",
    kv_rounding: str = "balanced",
    draft_precision: str = "auto",
    draft_cache: tuple[str, int] | None = None,
    on_loading: Callable[[int, int], object] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Teacher-forced scores: device, draft_precision, tokens, positions, targets and drafts as in `quantspec eval --json`.

    The first `context` tokens are processed as a prompt and not scored; the next one is fed, the others are predicted.
    `on_progress` is told tokens done and in all: the context's, once for each of three targets, and positions. Also
    cached_drafts and note, as in `Engine.info`.
    """

def sensitivity(
    model: str,
    tokens: Sequence[int],
    *,
    context: int = 0,
    device: str = "auto",
    threads: int | None = None,
    weights: str = "checkpoint",
    kv_rounding: str = "balanced",
    on_progress: Callable[[int, int], object] | None = None,
) -> dict[str, dict[str, Any]]:
    """Scores of the default draft with no matrix in 8 bits ("none"), and with each kind of matrices alone, by kind.

    acceptance and top1; added_bytes of a draft step, added_share of its weights, and value, the acceptance gained over that
    share (None of "none").
    """

def planned(
    model: str,
    *,
    capacity: int,
    device: str,
    threads: int | None,
    weights: str,
    kv_rounding: str,
    draft_precision: str,
    page_choice: str,
    accept: str,
    draft_model: str | None = None,
) -> int:
    """Bytes that an `Engine` with `every_view` will hold at its peak, or what refuses it before weights are read."""

def plan(
    model: str,
    *,
    capacity: int,
    prompt_capacity: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    weights: str = "checkpoint",
    kv_target: str = "int8",
    method: str = "quantspec",
    kv_rounding: str = "balanced",
    draft_weights: str = "int4",
    draft_precision: str = "auto",
    draft_pages: int | Literal["auto"] | None = None,
    page_choice: str = "best",
    accept: str = "replay",
    gamma: int | None = None,
    slots: int = 1,
    pool_tokens: int | None = None,
    draft_model: str | None = None,
    described: bool = False,
) -> dict[str, Any]:
    """What an `Engine` with these arguments would hold, before any weight is read.

    device, weights and draft_precision (which, for "auto"), fits, planned_bytes (at the peak), available_bytes, longest_context (tokens of each
    of `slots` sequences that fit), largest_batch (sequences of `capacity` tokens that fit), and the bytes of each part,
    named as in `Engine.stats`. `described` is as of `model_info`.
    """

def fitting(models: Sequence[str], *, device: str) -> list[tuple[int, int, int]]:
    """Of each model that config.json describes: bytes of weights and draft weights, and the longest context of one sequence
    that fits the device, 0 for none. The device is opened once.
    """

def rates(model: str, *, device: str, threads: int | None, context: int) -> dict[str, Any]:
    """What operations cost on a device at the widths of a model that config.json describes: device, device_name, threads,
    compute_capability (of a GPU) and read_gb_per_s.

    On a CPU also seconds a byte of weights and draft_weights takes in a step of each of `rows`, of fp16, int8, int4 and
    draft_int4 with each of `window` rows of a sequence of `context` tokens; dispatch_s, what handing a matrix to the threads
    takes; prompt_matrix and prompt_attention, operations a second of a prompt. Takes some seconds and 0.6 GB.
    """

def traffic(model: str, start: int, tokens: int, weights: str, *, draft_precision: str = "none", described: bool = False) -> dict[str, Any]:
    """What steps at positions start .. start + tokens read on average, over all layers and KV heads.

    weights_bytes (target, one pass; head_bytes of them its head), draft_weights_bytes (what a draft reads of int8 weights;
    None of a checkpoint's), pages and buffer_tokens (visible on average), upper_page_bytes, lower_page_bytes,
    full_page_bytes and page_bound_bytes (of one page), token_bytes (keys and values of one token in f16).
    """

def kernels(
    model: str, *, device: str, contexts: Sequence[int], rows: Sequence[int]
) -> tuple[str, str, float, list[dict[str, Any]]]:
    """Times the GPU's kernels at the shapes of a model.

    Returns the device, its own name, the bytes per second that a kernel reads which does nothing else, and one dict per
    measurement: kernel, form, rows, context, n, k, heads, kv_heads, head_dim, us, bytes (least to be moved), gb_per_s,
    bandwidth_gb_per_s, bandwidth_share, tflop_per_s (None where bytes bound).

    Raises:
        NativeError: "usage" on a CPU.
    """
