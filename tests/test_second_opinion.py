"""Whole texts compared with the equations: each token decoded by the installed wheel must be the one NumPy computes.

NumPy computes the prompt in full precision, then every new position by the visibility law over quantised pages, in
float64. Noise, warpers and the choice are implemented independently from docs/algorithm.md. The engine's arithmetic is
coarser: where the winner's margin exceeds its error the token must match, elsewhere it must be one of the leaders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llama_numpy
import numpy as np
import pytest
from conftest import DEMO
from llama_numpy import Array, G, Llama, half

from quantspec_cli import Engine
from quantspec_cli.model import Prompt
from quantspec_cli.selftest import cut_prompts

NEW = 100
# Decoding crosses 384 and 512, where a second and a third page become visible.
PROMPTS = (300, 420)
# BF16 activations change a logit by a few hundredths, far less than this.
LEAD = 0.3


def paper(x: Array, axis: int) -> tuple[Array, Array]:
    """(view Upper, view Both) by the paper: quantise to 4 bits, then quantise the error to 4 more."""
    least, most = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    constant = least == most
    scale = half(np.where(constant, 1, np.maximum((most - least) / 15, 2.0**-14)))
    zero = half(least)
    upper = np.clip(np.rint((x - zero) / scale), 0, 15)
    lower = np.clip(np.rint((x - zero - upper * scale) / (scale / 16)), -8, 7)
    views = upper * scale + zero, (upper + lower / 16) * scale + zero
    return tuple(np.where(constant, zero, view) for view in views)  # type: ignore[return-value]


ROUNDINGS = {"balanced": llama_numpy.balanced, "paper": paper}


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Philox4x32-10 of counters [n][4]."""
    a, b, c, d = counter.astype(np.uint64).T
    k, m = (np.uint64(word) for word in key)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (right >> shift) ^ b ^ k, right & low, (left >> shift) ^ d ^ m, left & low
        k, m = (k + np.uint64(0x9E3779B9)) & low, (m + np.uint64(0xBB67AE85)) & low
    return np.stack((a, b, c, d), 1)


def gumbel(seed: int, position: int, vocab: int) -> Array:
    """Noise of every token at a position, for sequence 0 and the purpose of sampling (both 0)."""
    blocks = np.arange((vocab + 3) // 4)
    zeros = np.zeros_like(blocks)
    counter = np.stack((zeros + position, zeros, zeros, blocks), 1)
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab]
    uniform = (2 * (words >> np.uint64(9)).astype(np.float64) + 1) / 2**24
    gumbels: Array = -np.log(-np.log(uniform))
    return gumbels


def scores(logits: Array, position: int, options: dict[str, Any], slack: float) -> Array:
    """The score that the chosen token maximises: its logit, or scaled logit plus noise among the tokens that are kept.

    `slack` moves the limits of the warpers, to identify tokens near a limit: about the largest change of a logit.
    """
    temperature = options.get("temperature", 0)
    if not temperature:
        return logits
    z = (logits - logits.max()) / temperature
    order = np.argsort(-z, kind="stable")
    keep = np.full(len(z), True)
    if options.get("top_k"):
        keep &= z >= z[order[options["top_k"] - 1]] - slack
    p = np.where(keep, np.exp(z), 0)
    before = np.cumsum(p[order]) - p[order]
    if options.get("top_p"):
        keep[order[before >= (options["top_p"] + slack / 4) * p.sum()]] = False
    if options.get("min_p"):
        keep &= p >= options["min_p"] * np.exp(-slack)
    return np.where(keep, z + gumbel(options["seed"], position, len(z)), -np.inf)


def penalised(logits: Array, options: dict[str, Any], prompt: list[int], answer: list[int]) -> Array:
    """Hugging Face's RepetitionPenaltyLogitsProcessor and NoRepeatNGramLogitsProcessor, and OpenAI's two penalties."""
    out, text = logits.copy(), prompt + answer
    seen = np.unique(text)
    factor = options.get("repetition_penalty", 1)
    out[seen] = np.where(out[seen] < 0, out[seen] * factor, out[seen] / factor)
    counts = np.bincount(np.array(answer, int), minlength=len(out))
    out -= options.get("frequency_penalty", 0) * counts + options.get("presence_penalty", 0) * (counts > 0)
    if n := options.get("no_repeat_ngram", 0):
        after: dict[tuple[int, ...], list[int]] = {}
        for gram in zip(*(text[i:] for i in range(n)), strict=False):
            after.setdefault(gram[:-1], []).append(gram[-1])
        out[after.get(tuple(text[len(text) + 1 - n :]), [])] = -np.inf
    return out


# Keys and values of every layer, and the logits of the last position.
Read = tuple[list[tuple[Array, Array]], Array]


def read(model: Llama, prompt: tuple[int, ...]) -> Read:
    """Reads a prompt in full precision."""
    past: list[tuple[Array, Array]] = []
    positions = np.arange(len(prompt))
    x = model.embedding[list(prompt)]
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x, positions)
        past.append((half(k), half(v)))
        x = model.rest(layer, x, model.attend(q, k, v, positions[:, None] >= positions))
    return past, model.logits(x[-1:])


def answered(model: Llama, prompt: Read, answer: list[int], kv_target: str, rounding: str) -> Array:
    """Logits of every token of an answer, [tokens][vocab], over the cache as docs/design/cache.md defines it."""
    view = {"fp16": None, "int8": 1, "int4": 0}[kv_target]
    past, logits = list(prompt[0]), [prompt[1]]
    begin = start = len(past[0][0])
    end = begin + len(answer) - 1
    while start < end:
        # The tokens of the answer are known, and positions between two page borders read the same quantised tokens.
        positions = np.arange(start, min((start // G + 1) * G, end))
        quantised = max(0, start // G - 1) * G
        x = model.embedding[[answer[position - begin] for position in positions]]
        for layer in range(model.layers):
            q, k, v = model.qkv(layer, x, positions)
            keys, values = (np.concatenate((old, half(new))) for old, new in zip(past[layer], (k, v), strict=True))
            past[layer] = keys, values
            if view is not None and quantised:
                pages = keys[:quantised].reshape(-1, G, *keys.shape[1:])
                seen = ROUNDINGS[rounding](pages, 1)[view].reshape(quantised, *keys.shape[1:])
                keys = np.concatenate((seen, keys[quantised:]))
                values = np.concatenate((ROUNDINGS[rounding](values[:quantised], 2)[view], values[quantised:]))
            x = model.rest(layer, x, model.attend(q, keys, values, positions[:, None] >= np.arange(len(keys))))
        logits.append(model.logits(x))
        start = int(positions[-1]) + 1
    return np.concatenate(logits)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(*llama_numpy.load(DEMO))


@pytest.fixture(scope="module")
def reading(model: Llama) -> Callable[[tuple[int, ...]], Read]:
    """Reads each prompt once: what it yields depends on neither the cache nor the options."""
    return functools.cache(lambda prompt: read(model, prompt))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_target", "rounding", "method", "options"),
    [
        ("int8", "balanced", "quantspec", {}),
        ("int8", "balanced", "quantspec", {"temperature": 0.9, "seed": 2**40 + 7}),
        ("int8", "paper", "kv4", {"temperature": 0.7, "seed": 1, "top_p": 0.9}),
        ("int4", "balanced", "w4", {"temperature": 1.3, "seed": 2, "top_k": 40}),
        ("int4", "paper", "ar", {"temperature": 1.0, "seed": 3, "min_p": 0.05}),
        ("fp16", "balanced", "quantspec", {"temperature": 0.8, "seed": 4, "top_k": 200, "top_p": 0.95, "min_p": 0.01}),
        ("int8", "balanced", "quantspec", {"repetition_penalty": 1.3, "no_repeat_ngram": 3}),
        (
            *("int8", "balanced", "kv4"),
            {"temperature": 0.8, "seed": 5, "top_k": 50, "frequency_penalty": 0.4, "presence_penalty": 0.5},
        ),
    ],
)
def test_every_token_is_the_one_the_equations_choose(
    model: Llama,
    reading: Callable[[tuple[int, ...]], Read],
    kv_target: str,
    rounding: str,
    method: str,
    options: dict[str, Any],
) -> None:
    gamma = 0 if method == "ar" else 5
    engine = Engine.load(context=600, method=method, gamma=gamma, kv_target=kv_target, kv_rounding=rounding)
    source = cut_prompts(engine.model)[-1]
    clear = 0
    for length in PROMPTS:
        prompt = source[:length]
        answer = engine.generate(Prompt(prompt), max_new_tokens=NEW, ignore_eos=True, **options)
        assert len(answer.tokens) == NEW
        rows = answered(model, reading(tuple(prompt)), answer.tokens, kv_target, rounding)
        for at, (token, row) in enumerate(zip(answer.tokens, rows, strict=True)):
            logits = penalised(row, options, prompt, answer.tokens[:at])
            surely, perhaps = (scores(logits, length + at, options, slack) for slack in (-0.1, 0.1))
            distance = surely.max() - perhaps
            assert distance[token] < LEAD, (length, length + at, token, distance[token])
            clear += np.sum(distance < LEAD) == 1
    # The comparison is meaningful only if most positions have a clear winner.
    assert clear > NEW


def test_the_noise_is_that_of_the_published_generator() -> None:
    # Random123's known answer for a counter and a key of zeros.
    assert [hex(word) for word in philox(np.zeros((1, 4)), (0, 0))[0]] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
