#!/usr/bin/env python3
"""Time plain decoding in PyTorch, as a baseline for `quantspec bench`.

    python tools/torch_step.py --shape llama-2-7b --depths 4096,32768,131072 [--vocab 8192]

One step of a Llama shape with random BF16 weights: layers by torch.compile, GEMMs by cuBLAS, attention over a 16-bit
cache by FlashAttention-2, all in one CUDA graph. Prints one JSON object per depth: milliseconds (median of replays
without the host in between). Needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

try:
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}\nhint: pip install torch")

HIDDEN, HEADS, DIM, LAYERS = 4096, 32, 128, 32
# KV heads, feed-forward width, vocabulary.
SHAPES = {"llama-2-7b": (32, 11008, 32000), "llama-3.1-8b": (8, 14336, 128256)}
REPLAYS = 30


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE by halves."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer:
    """One decoder layer around its attention."""

    def __init__(self, kv_heads: int, wide: int, depth: int) -> None:
        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        self.kv_heads, self.depth = kv_heads, depth
        self.qkv, self.out = tensor((HEADS + 2 * kv_heads) * DIM, HIDDEN), tensor(HIDDEN, HEADS * DIM)
        self.gate_up, self.down = tensor(2 * wide, HIDDEN), tensor(HIDDEN, wide)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.keys, self.values = tensor(1, kv_heads, depth, DIM), tensor(1, kv_heads, depth, DIM)

    def step(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """A token's hidden state after the layer; stores its key and value as the cache's last."""
        query, key, value = before(x, self.norm, self.qkv, cos, sin, kv_heads=self.kv_heads)
        self.keys[0, :, -1].copy_(key)
        self.values[0, :, -1].copy_(value)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            seen = functional.scaled_dot_product_attention(
                query[None, :, None], self.keys, self.values, enable_gqa=self.kv_heads != HEADS
            )
        weights = {"norm": self.norm, "out": self.out, "gate_up": self.gate_up, "down": self.down}
        return after(x, seen.reshape(1, HEADS * DIM), **weights)


@torch.compile
def before(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, projections, rotation."""
    qkv = functional.linear(functional.rms_norm(x, (HIDDEN,), norm, 1e-5), weight).view(-1, DIM)
    query, key, value = qkv.split([HEADS, kv_heads, kv_heads])
    return rotate(query, cos, sin), rotate(key, cos, sin), value


@torch.compile
def after(
    x: torch.Tensor,
    seen: torch.Tensor,
    *,
    norm: torch.Tensor,
    out: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Output projection and the feed-forward network."""
    x = x + functional.linear(seen, out)
    gate, up = functional.linear(functional.rms_norm(x, (HIDDEN,), norm, 1e-5), gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down)


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of replays of a graph of `work`, measured by events, after three warm-up replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


@torch.no_grad()
def measure(shape: str, depth: int, vocab: int | None) -> dict[str, object]:
    """One depth."""
    kv_heads, wide, own_vocab = SHAPES[shape]
    layers = [Layer(kv_heads, wide, depth) for _ in range(LAYERS)]
    head = torch.randn(vocab or own_vocab, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.rand(2, 1, DIM // 2, device="cuda", dtype=torch.bfloat16).unbind()

    def step() -> torch.Tensor:
        state = x
        for layer in layers:
            state = layer.step(state, cos, sin)
        return functional.linear(state, head).argmax(-1)

    return {"shape": shape, "vocab": len(head), "depth": depth, "ms": round(milliseconds(step), 3)}


def numbers(text: str) -> list[int]:
    """Positive numbers between commas."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def main() -> None:
    """Prints a line per depth."""
    parser = argparse.ArgumentParser(description="Time a plain decoding step in PyTorch.")
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--depths", type=numbers, default=[4096], help="comma list")
    parser.add_argument("--vocab", type=int, help="instead of the shape's own, to compare with a widened checkpoint")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no GPU\nhint: run it where torch.cuda.is_available()")
    for depth in options.depths:
        print(json.dumps(measure(options.shape, depth, options.vocab)), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
