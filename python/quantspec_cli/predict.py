"""Predicts decoding speed from the seconds of passes on a machine.

On a CPU, passes of a model of the same shape are timed (`_native.rates`). On a GPU, a pass takes the bytes it reads over the
measured bandwidth times the shares of `GPU_WEIGHTS` and `GPU_VIEWS`. docs/design/plan.md derives the formulas. All functions
are pure.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .options import METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Probability that a drafted token is accepted after accepted ones, by method; docs/design/plan.md has the sources.
ACCEPTANCE = {"quantspec": 0.92, "kv4": 0.99, "w4": 0.92, "qspec": 0.87, "window": 0.91, "snapkv": 0.87}
# The same of a draft that reads selected pages.
ACCEPTANCE_OF_PAGES = 0.87

# Methods that `auto` chooses among, those of them that may read selected pages, and the numbers of pages (`PAGES_AUTO` in
# quantspec-py).
CHOICES, OF_PAGES, PAGES = ("quantspec", "kv4", "w4"), ("quantspec", "kv4"), (16, 64, 256)

# Largest γ considered: that of the automatic policy.
GAMMA_MOST = 12

# Time of Python and the engine's loop in a round: a constant in seconds, a share of the passes' time, and the limit of their
# sum in seconds. Longer passes evict more of the loop's code from the caches. Fitted to `loop_us` of benchmarks/results.
LOOP = (6e-6, 0.01, 60e-6)

# Shares of the read bandwidth that GPU kernels reach, and further seconds per layer (`GPU_LAYER_S`). Measured on one H200;
# see docs/design/plan.md. Shares of weights are by the target's (`--weights`) and by rows of a step; `GPU_UPPER` are those of
# the upper plane from 16 rows on.
GPU_UPPER = ((16, 0.46), (32, 0.32), (64, 0.24), (128, 0.12))
GPU_WEIGHTS: dict[str, dict[str, Sequence[tuple[int, float]]]] = {
    "checkpoint": {
        "weights": ((1, 1.0), (8, 0.96), (32, 0.86), (64, 0.79), (128, 0.64)),
        "draft_weights": ((1, 0.79), (16, 0.60), (32, 0.49), (64, 0.35), (128, 0.18)),
        "coarse_weights": ((1, 0.74),),
    },
    "int8": {
        "weights": ((1, 0.83), (8, 0.81), (16, 0.75), (32, 0.54), (64, 0.43), (128, 0.22)),
        "draft_weights": ((1, 0.74), *GPU_UPPER),
        "coarse_weights": ((1, 0.49),),
    },
    "int4": {
        "weights": ((1, 0.64), *GPU_UPPER),
        "draft_weights": ((1, 0.73), *GPU_UPPER),
        "coarse_weights": ((1, 0.49),),
    },
}
GPU_VIEWS = {"fp16": 1.0, "int8": 1.0, "int4": 0.92}
# Query rows of a KV head (tokens times query heads) for which a kernel reads the target's cache once (kernels/attend.cu).
GPU_TILE = 32
GPU_LAYER_S = 8e-6

# Floating-point operations per second of a prompt, by compute capability: 130,900 tokens of a 7B shape at 12,390 tokens/s on
# an H200. Other GPUs are not measured.
GPU_PROMPT = {"9.0": 590e12}

# Tokens of a page.
PAGE_TOKENS = 128


def page_bytes(traffic: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a page of all layers, by view. `traffic` is the result of `_native.traffic`."""
    upper, lower = traffic["upper_page_bytes"], traffic["lower_page_bytes"]
    return {"int4": upper, "int8": upper + lower, "fp16": traffic["full_page_bytes"]}


def row_flops(info: Mapping[str, Any], visible: float) -> tuple[float, float]:
    """Floating-point operations of one row of a pass with this many visible tokens: of its matrices (head included) and of
    its attention. `info` is the result of `_native.model_info`.
    """
    width = info["heads"] * info["head_dim"]
    weights = info["layers"] * _layer(info) + info["hidden"] * info["vocab"]
    return 2.0 * weights, 4.0 * info["layers"] * width * visible


def _layer(info: Mapping[str, Any]) -> int:
    """Weights of a layer's matrices."""
    width, kv_width = info["heads"] * info["head_dim"], info["kv_heads"] * info["head_dim"]
    weights: int = info["hidden"] * (2 * width + 2 * kv_width + 3 * info["intermediate"])
    return weights


def prompt_flops(info: Mapping[str, Any], tokens: int, depth: int = 0) -> tuple[float, float]:
    """Floating-point operations of a prompt's `tokens` after `depth`: of its matrices and of its attention. Of the last layer
    only queries, keys and values are computed, except for the prompt's last token, which alone has the head.
    """
    before, width = info["layers"] - 1, (info["heads"] + 2 * info["kv_heads"]) * info["head_dim"]
    weights = tokens * (before * _layer(info) + info["hidden"] * width) + info["hidden"] * info["vocab"]
    # On average a token sees half of the new tokens.
    visible = depth + tokens / 2
    return 2.0 * weights, 4.0 * before * info["heads"] * info["head_dim"] * visible * tokens


class Draft(NamedTuple):
    """A method that drafts with the model itself, and the number of pages it reads; None is the method's own."""

    method: str
    pages: int | None = None

    @property
    def acceptance(self) -> float:
        """Assumed probability that a drafted token is accepted."""
        return ACCEPTANCE[self.method] if self.pages is None else min(ACCEPTANCE_OF_PAGES, ACCEPTANCE[self.method])


def drafts(visible: float) -> list[Draft]:
    """Every draft that is predicted if this many pages are visible. As for `auto`, a choice has at most two thirds of
    them."""
    pages = [Draft(method, pages) for method in OF_PAGES for pages in PAGES if 3 * pages <= 2 * visible]
    return [*map(Draft, ACCEPTANCE), *pages]


# A pass: a step of a draft, or one of the target.
Pass = Draft | str
TARGET = "target"


@dataclass(frozen=True)
class Curve:
    """Seconds by rows of a step: linear between the points, extrapolated from the last two."""

    points: Sequence[tuple[int, float]]

    def at(self, rows: int) -> float:
        """Seconds at this number of rows."""
        points = list(self.points)
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        pairs = list(pairwise(points))
        (left, low), (right, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return max(low + (high - low) * (rows - left) / (right - left), 0.0)


def tiled(seconds: float, rows: int) -> Curve:
    """Attention that reads the cache in `seconds`, once for so many rows."""
    reads = range(1, GAMMA_MOST + 2)
    return Curve([(row, n * seconds) for n in reads for row in ((n - 1) * rows + 1, n * rows)])


@dataclass(frozen=True)
class Load:
    """Reads of a step of one sequence at the end of its context, and floating-point operations per row.

    Attributes:
        layers: of the model.
        group: query heads of a KV head.
        weights: the target's, as `--weights` names them.
        kv_target: the target's view of the cache.
        weights_bytes: of the target's matrices.
        draft_weights_bytes: of the draft's.
        pages: visible ones.
        page_bytes: of one page in all layers, by view.
        recent_bytes: of the recent tokens.
        matrix_flops: floating-point operations of the matrices for one row.
        attention_flops: the same for attention.
        prompt_flops: the operations of a prompt that fills the context, of its matrices and of its attention.
        context: tokens.
    """

    layers: int
    group: int
    weights: str
    kv_target: str
    weights_bytes: float
    draft_weights_bytes: float
    pages: float
    page_bytes: Mapping[str, float]
    recent_bytes: float
    matrix_flops: float
    attention_flops: float
    prompt_flops: tuple[float, float]
    context: int

    @classmethod
    def of(
        cls,
        info: Mapping[str, Any],
        traffic: Mapping[str, Any],
        draft_weights_bytes: int,
        context: int,
        *,
        weights: str,
        kv_target: str,
    ) -> Load:
        """From `_native.model_info` and `_native.traffic` at the context's last position."""
        matrix, attention = row_flops(info, max(context, 1))
        return cls(
            layers=info["layers"],
            group=info["heads"] // info["kv_heads"],
            weights=weights,
            kv_target=kv_target,
            weights_bytes=traffic["weights_bytes"],
            draft_weights_bytes=draft_weights_bytes,
            pages=traffic["pages"],
            page_bytes=page_bytes(traffic),
            recent_bytes=traffic["buffer_tokens"] * traffic["token_bytes"],
            matrix_flops=matrix,
            attention_flops=attention,
            prompt_flops=prompt_flops(info, max(context, 1)),
            context=context,
        )

    def cache(self, view: str, pages: int | None = None) -> float:
        """Bytes of the visible cache in a view, of at most this many pages."""
        return self.page_bytes[view] * (self.pages if pages is None else min(pages, self.pages)) + self.recent_bytes

    def reads(self, of: Pass) -> tuple[str, float, str, float]:
        """What a pass reads: its weights, as `GPU_WEIGHTS` names them, and their bytes; a view and its bytes."""
        if isinstance(of, str):
            return "weights", self.weights_bytes, self.kv_target, self.cache(self.kv_target)
        method = METHODS[of.method]
        view = self.kv_target if method.draft_view == "target" else str(method.draft_view)
        cache = self.cache(view, of.pages or method.pages)
        if not method.draft_weights:
            return "weights", self.weights_bytes, view, cache
        weights = "coarse_weights" if of.method == "qspec" else "draft_weights"
        return weights, self.draft_weights_bytes, view, cache


@dataclass(frozen=True)
class Machine:
    """Seconds of a model's passes, of the target and of each draft.

    Attributes:
        read: bytes read per second.
        matrices: of a pass, by rows of all sequences.
        attention: of one sequence, by its rows.
        first_s: of a draft's first step, in addition.
        pass_s: further seconds per pass.
        token_s: seconds to choose a token.
        prompt_matrix: floating-point operations per second of a prompt's matrices; None if unknown.
        prompt_attention: the same for its attention.
    """

    read: float
    matrices: Mapping[Pass, Curve]
    attention: Mapping[Pass, Curve]
    first_s: Mapping[Draft, float]
    pass_s: float
    token_s: float
    prompt_matrix: float | None
    prompt_attention: float | None

    @classmethod
    def of(cls, rates: Mapping[str, Any], load: Load) -> Machine:
        """The machine that `_native.rates` describes; on a CPU for the drafts of `drafts(load.pages)`."""
        read, asked = rates["read_gb_per_s"] * 1e9, drafts(load.pages)
        if "target" not in rates:
            return cls._gpu(read, rates["compute_capability"], load)
        matrices: dict[Pass, Curve] = {}
        attention: dict[Pass, Curve] = {}
        seconds = zip(*rates["target"], strict=True)
        matrices[TARGET], attention[TARGET] = (Curve(tuple(zip(rates["rows"], of, strict=True))) for of in seconds)
        first_s = {}
        for draft, (first, later), many in zip(asked, rates["drafts"], rates["many_s"], strict=True):
            matrices[draft] = Curve(((1, later[0]), (rates["rows"][-1], many)))
            attention[draft] = Curve(((1, later[1]),))
            first_s[draft] = max(sum(first) - sum(later), 0.0)
        prompt = rates["prompt_matrix"], rates["prompt_attention"]
        return cls(read, matrices, attention, first_s, 0.0, rates["token_s"], *prompt)

    @classmethod
    def _gpu(cls, read: float, capability: str, load: Load) -> Machine:
        matrices: dict[Pass, Curve] = {}
        attention: dict[Pass, Curve] = {}
        passes: list[Pass] = [TARGET, *drafts(load.pages)]
        for of in passes:
            weights, weights_bytes, view, view_bytes = load.reads(of)
            shares = GPU_WEIGHTS[load.weights][weights]
            matrices[of] = Curve(tuple((rows, weights_bytes / (read * share)) for rows, share in shares))
            attention[of] = tiled(view_bytes / (read * GPU_VIEWS[view]), max(GPU_TILE // load.group, 1))
        prompt = GPU_PROMPT.get(capability)
        return cls(read, matrices, attention, defaultdict(float), GPU_LAYER_S * load.layers, 0.0, prompt, prompt)


@dataclass(frozen=True)
class Operation:
    """A part of a pass.

    Attributes:
        name: the operation.
        flops: floating-point operations.
        bytes: least to be read.
        seconds: predicted.
        read: bytes the machine reads per second.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    read: float

    def to_json(self) -> dict[str, Any]:
        """A row of `roofline` in `plan --json`; memory-bound if reading takes most of its time."""
        return {
            "operation": self.name,
            "flops": self.flops,
            "bytes": self.bytes,
            "intensity": self.flops / self.bytes if self.bytes else None,
            "bound": "memory" if self.bytes / self.read > self.seconds / 2 else "compute",
            "us": self.seconds * 1e6,
        }


def step(machine: Machine, load: Load, of: Pass, *, rows: int, batch: int, name: str) -> list[Operation]:
    """A pass of the target, or a later step of a draft, over `rows` tokens of each of `batch` sequences."""
    _, weights_bytes, view, view_bytes = load.reads(of)
    seen = view_bytes / load.cache(view) if load.cache(view) else 1.0
    return [
        Operation(
            f"{name} matrices",
            load.matrix_flops * rows * batch,
            weights_bytes,
            machine.matrices[of].at(rows * batch),
            machine.read,
        ),
        Operation(
            f"{name} attention",
            load.attention_flops * seen * rows * batch,
            view_bytes * batch,
            machine.attention[of].at(rows) * batch,
            machine.read,
        ),
    ]


def seconds(machine: Machine, load: Load, of: Pass, *, rows: int, batch: int) -> float:
    """Seconds of a pass and of the choice of its tokens."""
    operations = step(machine, load, of, rows=rows, batch=batch, name="")
    return sum(one.seconds for one in operations) + machine.pass_s + machine.token_s * rows * batch


def prompt(machine: Machine, load: Load) -> list[Operation]:
    """Prefill of a prompt that fills the context; empty if the machine's rate is unknown."""
    if machine.prompt_matrix is None or machine.prompt_attention is None:
        return []
    matrix, attention = load.prompt_flops
    return [
        Operation("prompt matrices", matrix, load.weights_bytes, matrix / machine.prompt_matrix, machine.read),
        Operation(
            "prompt attention", attention, load.cache("fp16"), attention / machine.prompt_attention, machine.read
        ),
    ]


def accepted_length(acceptance: float, gamma: int) -> float:
    """Expected tokens of a round of γ drafted ones, each accepted with probability α: 1 + α + … + α^γ."""
    return float(sum(acceptance**power for power in range(gamma + 1)))


@dataclass(frozen=True)
class Speed:
    """A prediction at the best γ, 0 if drafting does not pay."""

    gamma: int
    acceptance: float | None
    tokens_per_s: float


@dataclass(frozen=True)
class Rounds:
    """Seconds of the rounds of all sequences, by γ; index 0 is plain decoding.

    Attributes:
        draft: how tokens are drafted by the model itself; None for another model, and for copies of earlier text.
        batch: sequences.
        seconds: of a round.
    """

    draft: Draft | None
    batch: int
    seconds: Sequence[float]

    @classmethod
    def of(cls, machine: Machine, load: Load, draft: Draft | None, *, batch: int, step_s: float = 0.0) -> Rounds:
        """Rounds of a draft; `step_s` are the seconds of a draft step of another model."""
        constant, share, most = LOOP
        later = seconds(machine, load, draft, rows=1, batch=batch) if draft else step_s
        first_s = machine.first_s[draft] if draft else 0.0

        def of_gamma(gamma: int) -> float:
            verify = seconds(machine, load, TARGET, rows=gamma + 1, batch=batch)
            passes = verify + (gamma * later + first_s if gamma else 0.0)
            return passes + min(constant + share * passes, most)

        return cls(draft, batch, [of_gamma(gamma) for gamma in range(GAMMA_MOST + 1)])

    def speed(self, acceptance: float) -> Speed:
        """Tokens per second of all sequences together, at the best γ."""
        rates = [self.batch * accepted_length(acceptance, gamma) / time for gamma, time in enumerate(self.seconds)]
        best = max(range(len(rates)), key=rates.__getitem__)
        return Speed(best, acceptance, rates[best])

    @property
    def plain(self) -> float:
        """Tokens per second of plain decoding."""
        return self.batch / self.seconds[0]

    @property
    def pays_from(self) -> float | None:
        """Least acceptance, in thousandths, at which drafting is as fast as plain decoding; None if it never is."""
        shares = (thousandth / 1000 for thousandth in range(1001))
        return next((share for share in shares if self._gains(share)), None)

    def _gains(self, acceptance: float) -> bool:
        """True if rounds of some γ > 0 are as fast as plain decoding."""
        drafted = list(enumerate(self.seconds))[1:]
        return any(accepted_length(acceptance, gamma) * self.seconds[0] >= time for gamma, time in drafted)
