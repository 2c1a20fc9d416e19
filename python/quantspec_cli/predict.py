"""Predicts decoding speed: a sum of operations over a machine's memory bandwidth and compute rate.

An operation (all matrices of a pass, or its attention) takes its bytes times the seconds per byte at that number of rows.
On a CPU those are measured at the model's widths (`_native.rates`). On a GPU they are the measured bandwidth over the
shares of `GPU`. docs/design/plan.md derives the formulas. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .options import METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Share of drafted tokens that verification accepts, by method; docs/design/plan.md names the model and text.
ACCEPTANCE = {"quantspec": 0.85, "kv4": 0.98, "w4": 0.85}

# Largest γ considered: that of the automatic policy.
GAMMA_MOST = 12

# Overhead of Python and the engine's loop per round, in seconds: `loop_us` of benchmarks/results.
ROUND_S = 60e-6

# Shares of the read bandwidth that GPU kernels reach, by rows of a step, and further seconds per layer. Measured on one H200;
# see docs/design/plan.md.
GPU: dict[str, Any] = {
    "weights": ((1, 1.0), (8, 0.96), (32, 0.83), (64, 0.67)),
    "draft_weights": ((1, 0.79),),
    "fp16": ((1, 1.0),),
    "int8": ((1, 1.0),),
    "int4": ((1, 0.92),),
    "draft_int4": ((1, 0.92),),
    "layer_s": 8e-6,
}

# Floating-point operations per second of a prompt, by compute capability: 130,900 tokens of a 7B shape at 12,390 tokens/s on
# an H200. Other GPUs are not measured.
GPU_PROMPT = {"9.0": 590e12}

# Tokens of a page.
PAGE_TOKENS = 128


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


@dataclass(frozen=True)
class Curve:
    """Seconds per byte by rows of a step: linear between the points, extrapolated from the last two."""

    points: Sequence[tuple[int, float]]

    def at(self, rows: int) -> float:
        """Seconds per byte at this number of rows."""
        points = list(self.points)
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        pairs = list(pairwise(points))
        (left, low), (right, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return max(low + (high - low) * (rows - left) / (right - left), 0.0)


@dataclass(frozen=True)
class Machine:
    """Cost of operations.

    Attributes:
        read: bytes read per second.
        curves: by data read: "weights", "draft_weights", a view of the cache, "draft_int4".
        pass_s: further seconds per pass.
        prompt_matrix: floating-point operations per second of a prompt's matrices; None if unknown.
        prompt_attention: the same for its attention.
    """

    read: float
    curves: Mapping[str, Curve]
    pass_s: float
    prompt_matrix: float | None
    prompt_attention: float | None

    @classmethod
    def of(cls, rates: Mapping[str, Any], layers: int) -> Machine:
        """The machine that `_native.rates` describes."""
        read = rates["read_gb_per_s"] * 1e9
        if "weights" in rates:
            rows = {"weights": rates["rows"], "draft_weights": rates["rows"]}
            curves = {
                name: Curve(tuple(zip(rows.get(name, rates["window"]), rates[name], strict=True)))
                for name in ("weights", "draft_weights", "fp16", "int8", "int4", "draft_int4")
            }
            # Four matrices and one attention per layer, and the head.
            pass_s = rates["dispatch_s"] * (5 * layers + 1)
            return cls(read, curves, pass_s, rates["prompt_matrix"], rates["prompt_attention"])
        curves = {
            name: Curve(tuple((rows, 1 / (read * share)) for rows, share in shares))
            for name, shares in GPU.items()
            if name != "layer_s"
        }
        prompt = GPU_PROMPT.get(rates["compute_capability"])
        return cls(read, curves, GPU["layer_s"] * layers, prompt, prompt)


@dataclass(frozen=True)
class Load:
    """Reads of a step of one sequence at the end of its context, and floating-point operations per row.

    Attributes:
        layers: of the model.
        weights: bytes of the target's matrices.
        draft_weights: bytes of the draft's.
        views: bytes of the visible cache, recent tokens included, by view.
        matrix_flops: floating-point operations of the matrices for one row.
        attention_flops: the same for attention.
        layer_share: part of `matrix_flops` without the head, whose logits only a prompt's last row needs.
        context: tokens.
    """

    layers: int
    weights: float
    draft_weights: float
    views: Mapping[str, float]
    matrix_flops: float
    attention_flops: float
    layer_share: float
    context: int

    @classmethod
    def of(cls, info: Mapping[str, Any], seen: Mapping[str, Any], draft_weights: int, context: int) -> Load:
        """From `_native.model_info` and `_native.traffic` at the context's last position."""
        recent = seen["buffer_tokens"] * seen["token_bytes"]
        page = {"int4": seen["upper_page_bytes"], "fp16": seen["full_page_bytes"]}
        page["int8"] = seen["upper_page_bytes"] + seen["lower_page_bytes"]
        matrix, attention = row_flops(info, max(context, 1))
        return cls(
            layers=info["layers"],
            weights=seen["weights_bytes"],
            draft_weights=draft_weights,
            views={view: seen["pages"] * size + recent for view, size in page.items()},
            matrix_flops=matrix,
            attention_flops=attention,
            layer_share=2.0 * info["layers"] * _layer(info) / matrix,
            context=context,
        )


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


def target_step(machine: Machine, load: Load, view: str, *, rows: int, batch: int, name: str) -> list[Operation]:
    """One pass of the target over `rows` tokens of each of `batch` sequences."""
    return _step(machine, load, (name, "weights", load.weights), (view, load.views[view]), rows=rows, batch=batch)


def draft_step(machine: Machine, load: Load, method: str, target: str, *, batch: int) -> list[Operation]:
    """One draft step of a self-drafting method: one row of each sequence."""
    drafts = METHODS[method]
    own = ("draft_weights", load.draft_weights) if drafts.draft_weights else ("weights", load.weights)
    view = target if drafts.draft_view in {"target", None} else str(drafts.draft_view)
    # Rows that read draft weights also round their queries.
    curve = "draft_int4" if view == "int4" and drafts.draft_weights else view
    return _step(machine, load, ("draft", *own), (curve, load.views[view]), rows=1, batch=batch)


def _step(
    machine: Machine,
    load: Load,
    matrices: tuple[str, str, float],
    cache: tuple[str, float],
    *,
    rows: int,
    batch: int,
) -> list[Operation]:
    name, weights, weights_bytes = matrices
    view, view_bytes = cache
    return [
        Operation(
            f"{name} matrices",
            load.matrix_flops * rows * batch,
            weights_bytes,
            weights_bytes * machine.curves[weights].at(rows * batch),
            machine.read,
        ),
        Operation(
            f"{name} attention",
            load.attention_flops * rows * batch,
            view_bytes * batch,
            view_bytes * batch * machine.curves[view].at(rows),
            machine.read,
        ),
    ]


def seconds(machine: Machine, operations: Sequence[Operation]) -> float:
    """Of a pass."""
    return sum(operation.seconds for operation in operations) + machine.pass_s


def prompt(machine: Machine, load: Load) -> list[Operation]:
    """Prefill of a prompt that fills the context; empty if the machine's rate is unknown."""
    if machine.prompt_matrix is None or machine.prompt_attention is None:
        return []
    tokens = max(load.context, 1)
    matrix = load.matrix_flops * load.layer_share * tokens
    # On average a token sees half of the context.
    attention = load.attention_flops / 2 * tokens
    return [
        Operation("prompt matrices", matrix, load.weights, matrix / machine.prompt_matrix, machine.read),
        Operation(
            "prompt attention", attention, load.views["fp16"], attention / machine.prompt_attention, machine.read
        ),
    ]


def accepted_length(acceptance: float, gamma: int) -> float:
    """Expected tokens of a round of γ drafted ones, each accepted with probability α: 1 + α + … + α^γ."""
    return float(sum(acceptance**power for power in range(gamma + 1)))


@dataclass(frozen=True)
class Speed:
    """A method's prediction; `gamma` is the best one, 0 if drafting does not pay."""

    method: str
    gamma: int
    acceptance: float | None
    tokens_per_s: float


def speed(machine: Machine, load: Load, method: str, target: str, *, batch: int, acceptance: float) -> Speed:
    """Tokens per second of all sequences together, at the best γ."""

    def rate(gamma: int) -> float:
        verify = seconds(machine, target_step(machine, load, target, rows=gamma + 1, batch=batch, name="verify"))
        draft = seconds(machine, draft_step(machine, load, method, target, batch=batch)) if gamma else 0.0
        return batch * accepted_length(acceptance, gamma) / (gamma * draft + verify + ROUND_S)

    best = max(range(GAMMA_MOST + 1), key=rate)
    return Speed(method, best, acceptance, rate(best))


def plain(machine: Machine, load: Load, target: str, *, batch: int) -> Speed:
    """Plain decoding."""
    step = seconds(machine, target_step(machine, load, target, rows=1, batch=batch, name="decode"))
    return Speed("ar", 0, None, batch / (step + ROUND_S))
