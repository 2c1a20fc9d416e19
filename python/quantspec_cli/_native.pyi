"""Types of the native module, the only interface between Python and the engine. It handles token ids and numbers, no text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, final

from typing_extensions import Unpack

from .schema import Answer

__all__ = [
    "COMMIT",
    "DRAFTS_LIMIT_BYTES",
    "GAMMA_AUTO",
    "GAMMA_MAX",
    "NGRAM_MAX",
    "PAGES_AUTO",
    "PROMPTS_LIMIT_BYTES",
    "SENSITIVE",
    "STEP_ROWS_MAX",
    "Engine",
    "NativeError",
    "OpenDevice",
    "SignalWatch",
    "doctor",
    "draft_files",
    "evaluate",
    "fitting",
    "gguf_metadata",
    "kernels",
    "methods",
    "model_info",
    "open_device",
    "plan",
    "planned",
    "prompt_files",
    "rates",
    "sensitivity",
    "traffic",
]

COMMIT: str | None
"""The commit of the sources, "… with changes" if they differ from it; None if they were built outside of a repository."""

DRAFTS_LIMIT_BYTES: int
"""Most bytes of the folder of draft weights: a load that writes there removes the least recently used files first."""

def draft_files(folder: str) -> list[tuple[Path, Path | None, int, float]]:
    """Files of draft weights in a folder, least recently used first: path, model (None if another version wrote the file),
    bytes, and the last use in seconds since the epoch. Other files and links are left out; a missing folder counts as
    empty.

    Raises:
        OSError: the folder cannot be read.
    """

PROMPTS_LIMIT_BYTES: int
"""Most bytes of a folder of prompts: a prompt that is kept there removes the least recently used files first."""

def prompt_files(folder: str) -> list[tuple[Path, Path | None, int, float]]:
    """Files of prompts in a folder, as `draft_files`."""

GAMMA_MAX: int
"""Largest γ."""

GAMMA_AUTO: int
"""Longest γ of the automatic policy."""

PAGES_AUTO: list[int]
"""Numbers of draft pages among which the policy chooses."""

STEP_ROWS_MAX: int
"""Most rows of a step."""

NGRAM_MAX: int
"""Longest n-grams that can be forbidden."""

SENSITIVE: list[str]
"""Matrices that a draft may read in 8 bits."""

class NativeError(Exception):
    """Any error of the engine except an interrupt. An interrupt raises the signal handler's exception: KeyboardInterrupt for
    Ctrl-C."""

    kind: str
    message: str
    hint: str

@final
class SignalWatch:
    """While the body of a `with` on the main thread runs, a signal ends the process at once, even if a package holds the GIL.

    `answers` has the texts for standard error and standard output by the number of the signal, which needs a handler in
    Python. The files `temporary` are removed. The exit code is 128 plus the number.

    Raises:
        OSError: no descriptor or thread is free.
    """

    def __new__(cls, answers: dict[int, tuple[str, str]], temporary: Sequence[Path]) -> SignalWatch: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

class _Options(TypedDict, total=False):
    """Keyword arguments that shape an engine; their defaults are those of `EngineArguments` in quantspec-py/src/options.rs.
    `EngineOptions.native` has most of them.
    """

    device: str
    prompt_capacity: int | None
    slots: int
    pool_tokens: int | None
    threads: int | None
    weights: str
    kv_target: str
    kv_rounding: str
    method: str
    gamma: int | None
    accept: str
    draft_weights: str
    draft_precision: str
    draft_pages: int | Literal["auto"] | None
    page_choice: str
    draft_refresh: int
    draft_model_kv: str | None
    every_method: bool

@final
class Engine:
    """One model on one device with room for `slots` sequences of up to `capacity` tokens each.

    Prompts have at most `prompt_capacity` tokens (None: `capacity`): prefill holds every hidden state of a prompt.
    Sequences share the pages of `pool_tokens` (None: `slots` times `capacity`).

    One thread calls it; a call during another one, also from a callback, is an error. Long calls release the GIL and run
    pending signal handlers. So Ctrl-C ends them within 0.3 s, as does any other exception of a handler. Callbacks are
    called with (done, total), at most every 50 ms. KeyboardInterrupt, SystemExit and exceptions of handlers inside a
    callback end the call; any other exception of it is unraisable.
    """

    def __new__(
        cls,
        model: str,
        *,
        capacity: int,
        draft_model: str | None = None,
        draft_cache: tuple[str, int] | None = None,
        prompt_memory: bool = False,
        prompt_folder: str | None = None,
        on_loading: Callable[[int, int], object] | None = None,
        **options: Unpack[_Options],
    ) -> Engine:
        """`prompt_memory` keeps prompts in the device's memory, `prompt_folder` in a folder instead."""

    @property
    def info(self) -> dict[str, Any]:
        """The loaded model: device, device_name, simd, threads, weights, draft_precision (what "auto" chose), family, vocab,
        layers, max_positions, eos.

        Also block_rows (of a prefill), planned_bytes and load_s. cached_drafts is the share of the draft weights read
        from `draft_cache`, a folder and the fewest bytes worth keeping (None without one). note is one line about a
        problem with it. prompt_cache_limit_bytes is the limit of prompts in memory (None if none are kept).
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
        grammar: Answer | None = None,
    ) -> int:
        """Adds a prompt to a free slot and returns the slot. With `logprobs`, log-probabilities of its tokens are kept; a
        `grammar` says which tokens may be chosen.
        """

    def take_logprobs(self, slot: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """Log-probabilities of the tokens that the slot emitted after the previous call, each with those of the most likely
        tokens at its position."""

    def score(self, tokens: Sequence[int], on_progress: Callable[[int, int], object] | None = None) -> list[float]:
        """Log-probabilities of tokens from the second on under the target's view, teacher-forced, in a free slot.
        `on_progress` as in `prefill`.
        """

    def has_room(self, prompt: Sequence[int], max_new_tokens: int) -> bool:
        """True if `add` would succeed now: a slot is free, and so are the pages that the prompt does not share with a running
        sequence.
        """

    def prefill(self, slot: int, on_progress: Callable[[int, int], object] | None = None) -> int:
        """Processes the slot's prompt and returns the first new token."""

    def prefill_chunk(
        self, slot: int, most_rows: int, on_progress: Callable[[int, int], object] | None = None
    ) -> int | None:
        """Continues the slot's prompt for about this many rows, counted over all layers; returns the first new token at its
        end.

        One prompt at a time; rounds of other slots may run between its chunks.
        """

    def prefill_timed(
        self, slot: int, rows_from: int, on_progress: Callable[[int, int], object] | None = None
    ) -> tuple[int, float]:
        """As `prefill`; also returns the seconds spent on the prompt's rows from `rows_from` on."""

    def configure(
        self,
        *,
        method: str = "quantspec",
        kv_target: str = "int8",
        draft_pages: int | Literal["auto"] | None = None,
        page_choice: str = "best",
        draft_refresh: int = 0,
        gamma: int | None = None,
    ) -> None:
        """Changes the method of an engine opened with `every_method`; policy and statistics restart.

        `kv_target` may be "fp16" if the engine was opened with it.
        """

    def reset_stats(self) -> None:
        """Forgets counters and times; the policy keeps its measurements."""

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
        """Restarts the slot's answer over its prompt's cache, with `token` as its first token.

        False, without any change, if more was decoded than the buffer holds: prefill again.
        """

    def choose_gamma(self, slot: int) -> int:
        """The policy's γ for the slot's next round, limited by the tokens it may still emit."""

    def draft(self, gammas: Sequence[tuple[int, int]]) -> None:
        """Drafts γ tokens for every (slot, γ): fewer if an automatic γ ends the draft early or the method proposes fewer.

        The following `verify` covers these slots.
        """

    def verify(self) -> list[tuple[int, list[int]]]:
        """Verifies the drafts of `draft`: per slot the accepted tokens and one more of the target."""

    def verify_with_drafts(self) -> list[tuple[int, list[int], list[int]]]:
        """As `verify`; per slot also the drafted tokens. The accepted ones are both lists' first."""

    def read_gb_per_s(self) -> float:
        """Memory bandwidth of the engine's device in 10⁹ bytes per second, measured now. Takes less than 0.3 s."""

    def finish(self, slot: int) -> None:
        """Frees the slot."""

    def prompt_note(self) -> str | None:
        """One line about a problem with the prompt cache after the last call, each reported once; None if there was none."""

    def stats(self) -> dict[str, Any]:
        """Counters, times and bytes since opening or `configure`, named as in `quantspec run --json`."""

def doctor() -> dict[str, Any]:
    """This machine's cpu, gpu, memory_bytes and kernels."""

def gguf_metadata(path: str, keys: Sequence[str]) -> dict[str, Any]:
    """Metadata of a GGUF file with these keys, if it has them: texts, numbers, and lists of them."""

def methods() -> list[dict[str, Any]]:
    """Every method by name: about (its drafter), and the other fields of `options.Method`."""

def model_info(path: str, *, described: bool = False) -> dict[str, Any]:
    """The configuration of a checkpoint, a directory or a GGUF file: family, vocab, layers, max_positions, eos and shape;
    `quantised`: whether the file's matrices are.

    `described`: only config.json of a directory is read, and weights may be absent.
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
    ablated: tuple[str, str, int, bool] | None = None,
    draft_precision: str = "auto",
    pages: Sequence[int] = ...,
    draft_cache: tuple[str, int] | None = None,
    on_loading: Callable[[int, int], object] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Teacher-forced scores: device, device_name, simd, draft_precision, tokens, positions, targets, drafts and page_choices
    as in `quantspec eval --json`.

    The first `context` tokens are processed as a prompt and not scored; the next one is fed, the others are predicted.
    `ablated` is a cache with other groups than the engine's, on a CPU: axis of keys and of values ("channel" or "token"),
    elements of a group (1 to 128), and whether drafts read truncated codes.
    `on_progress` is called with tokens done and in total: the context once for each of three targets, and positions. Also
    returns cached_drafts and note, as in `Engine.info`.
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
    layers: bool = False,
    on_progress: Callable[[int, int], object] | None = None,
) -> dict[str, dict[str, Any]]:
    """Scores of the default draft with no matrix in 8 bits ("none"), and with each kind of matrix alone, by kind.

    acceptance and top1; added_bytes of a draft step, added_share of its weights, and value, the acceptance gained over that
    share (None for "none"). With `layers`, on a CPU, a kind also has layers: for each layer, the acceptance if its matrix
    alone is read in the target's precision.
    """

def planned(
    model: str,
    *,
    capacity: int,
    draft_model: str | None = None,
    **options: Unpack[_Options],
) -> int:
    """Peak bytes of an `Engine` with `every_method`; or its refusal, before weights are read."""

@final
class OpenDevice:
    """A device that is open: while it exists, `plan` does not open it, and an `Engine` opens it sooner."""

def open_device(model: str, *, device: str) -> OpenDevice:
    """Opens the device that an engine of the model would choose, in parallel with other threads."""

def plan(
    model: str,
    *,
    capacity: int,
    draft_model: str | None = None,
    described: bool = False,
    opened: OpenDevice | None = None,
    **options: Unpack[_Options],
) -> dict[str, Any]:
    """Memory of an `Engine` with these arguments, before any weight is read.

    device, weights and draft_precision (resolved from "auto"), fits, planned_bytes (peak), available_bytes, longest_context
    (tokens of each of `slots` sequences that fit), largest_batch (sequences of `capacity` tokens that fit), both with what
    "auto" is at that size, and the bytes of each part, named as in `Engine.stats`. `described` as in `model_info`.
    `opened` is the device, if it is open.
    """

def fitting(models: Sequence[str], *, device: str, weights: str) -> list[tuple[int, int, int]]:
    """For each model that config.json describes: bytes of weights and draft weights, and the longest context of one sequence
    that fits the device, 0 for none. The device is opened once.
    """

def rates(
    model: str,
    *,
    device: str,
    threads: int | None,
    context: int,
    weights: str,
    kv_target: str,
    draft_precision: str,
    drafts: Sequence[tuple[str, int | None]],
) -> dict[str, Any]:
    """Speed of a device: device, device_name, threads, compute_capability (of a GPU) and read_gb_per_s.

    On a CPU also seconds of passes of a model that config.json describes, of one sequence of `context` tokens, as pairs
    (matrices, attention): target for each number of `rows`, drafts as (first step, later step) for each (method, selected
    pages or None) of `drafts`. many_s has a draft's matrices at the last of `rows`, token_s is the time to choose a token;
    prompt_matrix and prompt_attention are operations per second of a prompt. Takes some seconds, and up to 2 GB.
    """

def traffic(
    model: str,
    start: int,
    tokens: int,
    weights: str,
    device: str,
    *,
    draft_precision: str = "none",
    described: bool = False,
) -> dict[str, Any]:
    """Mean reads of steps at positions start .. start + tokens, over all layers and KV heads.

    weights_bytes (target, one pass; head_bytes of them its head), draft_weights_bytes (read by a draft from int8 weights;
    None for a checkpoint's), pages and buffer_tokens (mean visible), upper_page_bytes, lower_page_bytes, full_page_bytes
    and page_score_bytes (of one page), token_bytes (keys and values of one token in f16).
    """

def kernels(
    model: str, *, device: str, contexts: Sequence[int], rows: Sequence[int]
) -> tuple[str, str, float, list[dict[str, Any]]]:
    """Times the GPU's kernels at the shapes of a model.

    Returns the device, its name, its read bandwidth in bytes per second, and one dict per measurement: kernel, form,
    rows, context, n, k, heads, kv_heads, head_dim, us, bytes (least to be moved), gb_per_s, bandwidth_gb_per_s,
    bandwidth_share, tflop_per_s (None if memory-bound).

    Raises:
        NativeError: "usage" on a CPU.
    """
