#!/usr/bin/env python3
"""Time plain decoding in PyTorch, as a baseline for `quantspec bench`.

    python tools/torch_step.py --shape llama-2-7b --depths 4096,32768,131072 [--batch 8,24] [--vocab 8192]

One step of a Llama shape with random BF16 weights: layers by torch.compile, GEMMs by cuBLAS, attention over a 16-bit
cache, all in one CUDA graph. Attention is by FlashAttention-2 and by cuDNN in turn, and the faster one counts. Prints one
JSON object per batch and depth: milliseconds (median of replays without the host in between). Needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial

try:
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}\nhint: pip install torch")

DIM, LAYERS = 128, 32
# Query heads, KV heads, feed-forward width, vocabulary. `wide-16-heads` is the model of the batches in docs/benchmarks.md.
SHAPES = {
    "llama-2-7b": (32, 32, 11008, 32000),
    "llama-3.1-8b": (32, 8, 14336, 128256),
    "wide-16-heads": (16, 16, 5632, 8192),
}
ATTENTION = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
REPLAYS = 30


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE by halves."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer:
    """One decoder layer around its attention, with the cache of `batch` sequences."""

    def __init__(self, shape: str, batch: int, depth: int) -> None:
        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        self.heads, self.kv_heads, wide, _ = SHAPES[shape]
        hidden = self.heads * DIM
        self.qkv, self.out = tensor(hidden + 2 * self.kv_heads * DIM, hidden), tensor(hidden, hidden)
        self.gate_up, self.down = tensor(2 * wide, hidden), tensor(hidden, wide)
        self.norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
        self.keys, self.values = (tensor(batch, self.kv_heads, depth, DIM) for _ in range(2))

    def step(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: SDPBackend) -> torch.Tensor:
        """The hidden states [batch, hidden] after the layer; stores the tokens' keys and values as the cache's last."""
        query, key, value = before(x, self.norm, self.qkv, cos, sin, heads=self.heads, kv_heads=self.kv_heads)
        self.keys[:, :, -1].copy_(key)
        self.values[:, :, -1].copy_(value)
        with sdpa_kernel(attention):
            seen = functional.scaled_dot_product_attention(
                query[:, :, None], self.keys, self.values, enable_gqa=self.kv_heads != self.heads
            )
        weights = {"norm": self.norm, "out": self.out, "gate_up": self.gate_up, "down": self.down}
        return after(x, seen.reshape(x.shape), **weights)


@torch.compile
def before(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm, projections, rotation: queries, keys and values [batch, heads, channels]."""
    qkv = functional.linear(functional.rms_norm(x, norm.shape, norm, 1e-5), weight).view(len(x), -1, DIM)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
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
    gate, up = functional.linear(functional.rms_norm(x, norm.shape, norm, 1e-5), gate_up).chunk(2, -1)
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
def measure(shape: str, batch: int, depth: int, vocab: int | None) -> dict[str, object]:
    """A step of `batch` sequences of `depth` tokens each."""
    heads, _, _, own_vocab = SHAPES[shape]
    layers = [Layer(shape, batch, depth) for _ in range(LAYERS)]
    head = torch.randn(vocab or own_vocab, heads * DIM, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(batch, heads * DIM, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.rand(2, 1, 1, DIM // 2, device="cuda", dtype=torch.bfloat16).unbind()

    def step(attention: SDPBackend) -> torch.Tensor:
        state = x
        for layer in layers:
            state = layer.step(state, cos, sin, attention)
        return functional.linear(state, head).argmax(-1)

    times = {name: milliseconds(partial(step, attention)) for name, attention in ATTENTION.items()}
    fastest = min(times, key=lambda name: times[name])
    return {
        "device_name": torch.cuda.get_device_name(),
        "shape": shape,
        "vocab": len(head),
        "batch": batch,
        "depth": depth,
        "ms": round(times[fastest], 3),
        "attention": fastest,
    }


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
    parser.add_argument("--batch", type=numbers, default=[1], help="comma list of numbers of sequences")
    parser.add_argument("--vocab", type=int, help="instead of the shape's own, to compare with a widened checkpoint")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no GPU\nhint: run it where torch.cuda.is_available()")
    for batch in options.batch:
        for depth in options.depths:
            try:
                row = measure(options.shape, batch, depth, options.vocab)
            except torch.OutOfMemoryError:
                sys.exit(
                    f"error: {batch} x {depth} tokens do not fit in the GPU's memory\nhint: use a smaller --batch or --depths"
                )
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
