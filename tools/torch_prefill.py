#!/usr/bin/env python3
"""Time prompts in PyTorch, for comparison with `measure prompts` of quantspec-cuda.

    python tools/torch_prefill.py --shape llama-2-7b --tokens 128,512,2048,8192,32768,131072
    python tools/torch_prefill.py --attention 32/32/128,32/8/64,16/8/256 --tokens 8192,32768
    python tools/torch_prefill.py --attention 32/8/128 --tokens 65536,131072 --step

One layer of a Llama shape with random BF16 weights: RMSNorm, SiLU and additions in PyTorch, GEMMs by cuBLAS, causal
attention by cuDNN and by FlashAttention-2; no RoPE and no cache. With --attention, causal attention of HEADS/KV
HEADS/WIDTH alone; with --step, attention of one query over all tokens, over several caches in turn. Prints one JSON
object per length and attention: milliseconds (median of replays of a CUDA graph). Needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

# Explains how to get PyTorch if it is missing.
from torch_step import DIM, HEADS, HIDDEN, LAYERS, SHAPES, milliseconds, need_gpu, numbers

# isort: split
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-attention-2": SDPBackend.FLASH_ATTENTION}
# Rows of the feed-forward network at a time; activations of 131,072 rows do not fit.
BLOCK = 16384
# Total bytes of the caches that steps read in turn, larger than any L2.
ROTATED = 1 << 30


def tensor(*shape: int) -> torch.Tensor:
    """Random numbers of ordinary size."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: SDPBackend) -> torch.Tensor:
    """Causal attention of [1][heads][tokens][width]; a single query sees every token."""
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, enable_gqa=query.shape[1] != key.shape[1]
        )


def attend_each(query: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]], backend: SDPBackend) -> None:
    """Attention over several caches in turn."""
    for key, value in caches:
        attend(query, key, value, backend)


class Layer:
    """One decoder layer."""

    def __init__(self, kv_heads: int, wide: int) -> None:
        self.kv_heads = kv_heads
        self.qkv, self.out = tensor((HEADS + 2 * kv_heads) * DIM, HIDDEN), tensor(HIDDEN, HEADS * DIM)
        self.gate_up, self.down = tensor(2 * wide, HIDDEN), tensor(HIDDEN, wide)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def prompt(self, x: torch.Tensor, backend: SDPBackend) -> None:
        """Runs the layer on hidden states [tokens][HIDDEN], in place."""
        tokens = len(x)
        qkv = functional.linear(functional.rms_norm(x, (HIDDEN,), self.norm, 1e-5), self.qkv)
        heads = qkv.view(1, tokens, -1, DIM).transpose(1, 2)
        query, key, value = heads.split([HEADS, self.kv_heads, self.kv_heads], 1)
        seen = attend(query, key, value, backend)[0].transpose(0, 1).reshape(tokens, -1)
        x += functional.linear(seen, self.out)
        for start in range(0, tokens, BLOCK):
            part = x[start : start + BLOCK]
            gate, up = functional.linear(functional.rms_norm(part, (HIDDEN,), self.norm, 1e-5), self.gate_up).chunk(
                2, -1
            )
            part += functional.linear(functional.silu(gate) * up, self.down)


def heads(text: str) -> list[tuple[int, int, int]]:
    """Triples of positive numbers, HEADS/KV HEADS/WIDTH, between commas."""
    found = [tuple(int(number) for number in part.split("/")) for part in text.split(",")]
    if any(len(one) != 3 or min(one) < 1 or one[0] % one[1] for one in found):
        raise ValueError
    return [(one[0], one[1], one[2]) for one in found]


def say(ms: float, **about: object) -> None:
    """Prints one result."""
    print(json.dumps({**about, "ms": round(ms, 4)}), flush=True)


@torch.no_grad()
def main() -> None:
    """Prints a line per length and attention."""
    parser = argparse.ArgumentParser(description="Time prompts in PyTorch.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=tuple(SHAPES))
    what.add_argument("--attention", type=heads, help="HEADS/KV HEADS/WIDTH, comma list")
    parser.add_argument("--step", action="store_true", help="attention of one query")
    parser.add_argument("--tokens", type=numbers, default=[8192], help="comma list")
    options = parser.parse_args()
    if options.step and options.shape:
        parser.error("argument --step: not allowed with argument --shape")
    need_gpu()
    for tokens in options.tokens:
        timed = partial(milliseconds, warm_up=2, replays=6 if tokens > 4 * BLOCK else 12)
        for name, backend in BACKENDS.items():
            if options.shape:
                kv_heads, wide, _ = SHAPES[options.shape]
                layer, x = Layer(kv_heads, wide), tensor(tokens, HIDDEN)
                ms = timed(partial(layer.prompt, x, backend))
                rate = round(tokens / ms * 1e3 / LAYERS)
                say(ms, shape=options.shape, tokens=tokens, attention=name, tokens_per_s_of_32_layers=rate)
                continue
            for query_heads, kv_heads, width in options.attention:
                query = tensor(1, query_heads, 1 if options.step else tokens, width)
                copies = max(2, ROTATED // (4 * kv_heads * tokens * width)) if options.step else 1
                caches = [
                    (tensor(1, kv_heads, tokens, width), tensor(1, kv_heads, tokens, width)) for _ in range(copies)
                ]
                try:
                    ms = timed(partial(attend_each, query, caches, backend)) / copies
                except RuntimeError as error:
                    print(f"{name} does not take heads of {width}: {str(error).splitlines()[0]}", file=sys.stderr)
                    continue
                shape = f"{query_heads}/{kv_heads}/{width}"
                if options.step:
                    rate = round(4 * kv_heads * tokens * width / ms / 1e6)
                    say(ms, heads=shape, tokens=tokens, attention=name, gb_per_s=rate)
                else:
                    tflops = round(2 * tokens**2 * query_heads * width / ms / 1e9)
                    say(ms, heads=shape, tokens=tokens, attention=name, tflop_per_s=tflops)


if __name__ == "__main__":
    main()
