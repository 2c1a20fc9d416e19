"""A stand-in for `quantspec_cli._native`: a toy model in pure Python, with scripted acceptance.

The target's next token is a function of the sequence alone, so all decoding methods must agree; a script sets the number
of accepted tokens. Settings are class attributes of `Script`. A child process reads them from FAKE_NATIVE (JSON) and
writes each stage it begins to the file FAKE_NATIVE_STAGES, one word per line: load, prefill, verify.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import quantspec_cli._native

Progress = Callable[[int, int], object]

# The engine's own.
COMMIT = quantspec_cli._native.COMMIT
methods = quantspec_cli._native.methods


class Script:
    """Behaviour of the toy, set by tests."""

    answer: list[int] | None = None  # token ids to emit, in order, then 3s; None: pseudo-random ones
    accepted: list[int] = [2, 0, 7, 1, 16]  # accepted drafted tokens of each round, repeated, limited by gamma
    load_s: float = 0.0
    prefill_s: float = 0.0
    round_s: float = 0.0
    corrupt: tuple[str, int] | None = None  # (method, position): that method emits a wrong token there
    fail: tuple[str, str, str] | None = None  # error of a verify
    fail_after: int = 0  # verifies before that one
    not_finite: int | None = None  # rounds fail if a prompt has this many tokens
    memory_bytes: int = 10**12  # of the machine; one token of a sequence uses 1,000
    engines: list[dict[str, Any]] = []  # options of every engine opened
    room_asked: int = 0  # calls of has_room
    device: str = "cpu"  # that plans are for
    capability: str = "9.0"  # compute capability of the GPU whose speed is predicted

    @classmethod
    def reset(cls) -> None:
        """Restores the defaults, or FAKE_NATIVE's settings."""
        settings = json.loads(os.environ.get("FAKE_NATIVE", "{}"))
        cls.answer = settings.get("answer")
        cls.accepted = [2, 0, 7, 1, 16]
        cls.load_s = settings.get("load_s", 0.0)
        cls.prefill_s = settings.get("prefill_s", 0.0)
        cls.round_s = settings.get("round_s", 0.0)
        cls.corrupt = None
        cls.fail = None
        cls.fail_after = 0
        cls.not_finite = settings.get("not_finite")
        cls.memory_bytes = settings.get("memory_bytes", 10**12)
        cls.engines = []
        cls.room_asked = 0
        cls.device = "cpu"
        cls.capability = "9.0"


class NativeError(Exception):
    """An error of the engine."""

    def __init__(self, kind: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


class SignalWatch(contextlib.nullcontext[None]):
    """Leaves signals to Python."""

    def __init__(self, answers: object, temporary: object) -> None:
        super().__init__()


class Engine:
    """Same calls as the real one."""

    def __init__(
        self,
        model: str,
        *,
        capacity: int,
        slots: int = 1,
        on_loading: Progress | None = None,
        method: str = "quantspec",
        gamma: int | None = None,
        device: str = "auto",
        **options: Any,
    ) -> None:
        Script.engines.append({"capacity": capacity, "slots": slots, "method": method, "gamma": gamma, **options})
        if device.startswith("cuda"):
            raise NativeError("device", "no CUDA device", "use --device cpu")
        _begun("load")
        _sleep(Script.load_s, on_loading)
        config = model_info(model)
        self.info = {
            **config,
            "device": "cpu",
            "device_name": "toy",
            "simd": "none",
            "threads": options["threads"] or 1,
            "weights": "int8" if options["weights"] == "int8" else "checkpoint",
            "draft_precision": "none",
            "planned_bytes": 1000 * capacity * slots,
            "load_s": Script.load_s,
        }
        self._vocab = config["vocab"]
        self._capacity = capacity
        self._pool = (options.get("pool_tokens") or capacity * slots) // 128
        self._method = method
        self._gamma = 4 if gamma is None else gamma
        self._sequences: list[dict[str, Any] | None] = [None] * slots
        self._turns: list[tuple[int, int]] | None = None
        self._verified = 0
        self._rounds = self._drafted = self._accepted = 0

    def add(self, prompt: Sequence[int], *, max_new_tokens: int, seed: int, temperature: float, **_: Any) -> int:
        for value in (max_new_tokens, seed):
            assert 0 <= value < 2**64, "PyO3 would raise OverflowError"
        if not prompt or max(prompt) >= self._vocab:
            raise NativeError("model", "bad prompt", "check the tokenizer")
        if len(prompt) + max_new_tokens > self._capacity:
            raise NativeError("does_not_fit", "capacity", "lower -n")
        if None not in self._sequences:
            raise NativeError("usage", f"all {len(self._sequences)} slots are in use", "finish a sequence first")
        if not self._fits(len(prompt) + max_new_tokens):
            raise NativeError("usage", "too few pages are free", "finish a sequence first")
        slot = self._sequences.index(None)
        self._sequences[slot] = {
            "ids": list(prompt),
            "prompt": len(prompt),
            "size": (len(prompt) + max_new_tokens) // 128,
            "remaining": max_new_tokens,
            "salt": seed if temperature else None,
        }
        return slot

    def has_room(self, prompt: Sequence[int], max_new_tokens: int) -> bool:
        Script.room_asked += 1
        return self._fits(len(prompt) + max_new_tokens)

    def _fits(self, tokens: int) -> bool:
        taken = sum(sequence["size"] for sequence in self._sequences if sequence)
        return None in self._sequences and taken + tokens // 128 <= self._pool

    def prompt_note(self) -> str | None:
        return None

    def prefill(self, slot: int, on_progress: Progress | None = None) -> int:
        _begun("prefill")
        _sleep(Script.prefill_s, on_progress)
        return self._next(self._sequence(slot))

    def prefill_chunk(self, slot: int, most_rows: int, on_progress: Progress | None = None) -> int | None:
        """A prompt has one row per token, in one layer."""
        sequence = self._sequence(slot)
        sequence["read"] = sequence.get("read", 0) + most_rows
        if sequence["read"] < sequence["prompt"]:
            _sleep(Script.prefill_s * most_rows / sequence["prompt"], on_progress)
            return None
        return self.prefill(slot, on_progress)

    def choose_gamma(self, slot: int) -> int:
        return 0 if self._method == "ar" else min(self._gamma, self._sequence(slot)["remaining"] - 1)

    def draft(self, gammas: Sequence[tuple[int, int]]) -> None:
        for slot, gamma in gammas:
            sequence = self._sequence(slot)
            if not 0 <= gamma < sequence["remaining"]:
                raise NativeError("usage", f"gamma {gamma} is out of range", "use choose_gamma")
        self._turns = list(gammas)

    def verify(self) -> list[tuple[int, list[int]]]:
        if self._turns is None:
            raise NativeError("usage", "verify without draft", "call draft first")
        _begun("verify")
        _sleep(Script.round_s, None)
        if Script.fail and self._verified == Script.fail_after:
            raise NativeError(*Script.fail)
        self._verified += 1
        turns, self._turns = self._turns, None
        if any(self._sequence(slot)["prompt"] == Script.not_finite for slot, _ in turns):
            raise NativeError("not_finite", "logits are not finite", "use another model")
        emitted = []
        for slot, gamma in turns:
            accepted = min(gamma, Script.accepted[self._rounds % len(Script.accepted)])
            self._rounds += 1
            self._drafted += gamma
            self._accepted += accepted
            sequence = self._sequence(slot)
            emitted.append((slot, [self._next(sequence) for _ in range(accepted + 1)]))
        return emitted

    def finish(self, slot: int) -> None:
        self._sequences[slot] = None

    def stats(self) -> dict[str, Any]:
        drafted = self._drafted or None
        return {
            "load_s": Script.load_s,
            "prefill_s": 0.5,
            "decode_s": 1.5,
            "draft_s": 0.5,
            "verify_s": 1.0,
            "prefill_tokens_per_s": 1000.0,
            "decode_tokens_per_s": 33.3 if self._rounds else None,
            "rounds": self._rounds,
            "gamma_mean": self._drafted / self._rounds if self._rounds else None,
            "draft_pages_mean": drafted and 2.0,
            "drafted_tokens": self._drafted,
            "copied_tokens": 0,
            "guessed_tokens": 0,
            "right_guesses": 0,
            "accepted_tokens": self._accepted,
            "acceptance_rate": drafted and self._accepted / drafted,
            "mean_acceptance_length": drafted and 1 + self._accepted / self._rounds,
            "acceptance_rate_per_position": drafted and [self._accepted / self._rounds],
            "weights_bytes": 13_840_832,
            "draft_weights_bytes": 4_000_000,
            "cache_upper_bytes": 1_000,
            "cache_lower_bytes": 1_000,
            "cache_full_bytes": 0,
            "prompt_cache_bytes": 0,
            "reused_tokens": 0,
            "reserved_pages": 40,
            "pool_waste": 0.025,
            "buffer_bytes": 500,
            "workspace_bytes": 500,
            "host_bytes": 0,
            "planned_bytes": self.info["planned_bytes"],
            "peak_bytes": None,
        }

    def free_slots(self) -> int:
        """For tests: number of slots without a sequence."""
        return self._sequences.count(None)

    def _sequence(self, slot: int) -> dict[str, Any]:
        sequence = self._sequences[slot]
        if sequence is None:
            raise NativeError("usage", f"slot {slot} holds no sequence", "use a slot that add returned")
        return sequence

    def _next(self, sequence: dict[str, Any]) -> int:
        ids = sequence["ids"]
        place = len(ids) - sequence["prompt"]
        if Script.answer is not None:
            token = Script.answer[place] if place < len(Script.answer) else 3
        else:
            digest = hashlib.sha256(repr((ids[-4:], len(ids), sequence["salt"])).encode()).digest()
            token = 3 + int.from_bytes(digest[:4], "little") % (self._vocab - 3)
        if Script.corrupt is not None and Script.corrupt == (self._method, place):
            token = 3 + (token - 2) % (self._vocab - 3)
        ids.append(token)
        sequence["remaining"] -= 1
        assert sequence["remaining"] >= 0, "a round emitted more than was asked for"
        return token


def doctor() -> dict[str, Any]:
    return {
        "cpu": {"name": "toy", "threads": 2, "simd": "none", "simd_reason": "a toy has none", "read_gb_per_s": 12.5},
        "gpu": {"available": False, "reason": "a toy has none", "devices": []},
        "memory_bytes": 8_000_000_000,
        "kernels": ["attend ptx compute_80", "attend sm_100", "attend sm_90a", "sample sm_100", "sample sm_90a"],
    }


def kernels(
    model: str, *, device: str, contexts: Sequence[int], rows: Sequence[int]
) -> tuple[str, str, float, list[dict[str, Any]]]:
    row = {"form": "x", "rows": rows[0], "us": 2.0, "bytes": 4_000_000, "gb_per_s": 2000.0, "bandwidth_share": 0.5}
    row |= {"bandwidth_gb_per_s": 4000.0, "tflop_per_s": None, "context": None, "n": None, "k": None}
    measured = [row | {"kernel": "attend", "context": contexts[0]}, row | {"kernel": "linear", "n": 96, "k": 32}]
    return "cuda:0", "toy", 4e12, measured


def model_info(path: str, *, described: bool = False) -> dict[str, Any]:
    config = json.loads((Path(path) / "config.json").read_text())
    if not (Path(path) / "model.safetensors").exists():
        raise NativeError("model", f"{path} has no weights", "copy model.safetensors into it")
    eos = config.get("eos_token_id", [])
    return {
        "family": config["model_type"],
        "vocab": config["vocab_size"],
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "max_positions": config["max_position_embeddings"],
        "quantised": False,
        "eos": eos if isinstance(eos, list) else [eos],
    }


def planned(model: str, *, capacity: int, **_options: Any) -> int:
    model_info(model)
    return capacity


def fitting(models: Sequence[str], *, device: str, weights: str) -> list[tuple[int, int, int]]:
    return [(1000, 500, 4096) for _ in models]


def plan(
    model: str, *, capacity: int, slots: int = 1, pool_tokens: int | None = None, **_options: Any
) -> dict[str, Any]:
    config = model_info(model)
    needed, available = 1000 * min(capacity * slots, pool_tokens or capacity * slots), Script.memory_bytes
    parts = ("weights", "draft_weights", "cache_upper", "cache_lower", "cache_full", "buffer", "workspace")
    return {
        "device": Script.device,
        "weights": "checkpoint",
        "draft_precision": "none",
        "fits": capacity <= config["max_positions"] and needed <= available,
        "planned_bytes": needed,
        "available_bytes": available,
        "longest_context": min(config["max_positions"], available // (1000 * slots)),
        "largest_batch": available // (1000 * capacity),
        **{f"{part}_bytes": 0 for part in parts},
    }


def traffic(_model: str, position: int, *_arguments: Any, **_options: Any) -> dict[str, int]:
    pages = {f"{plane}_page_bytes": 4096 for plane in ("upper", "lower", "full")}
    return {
        **pages,
        "pages": position // 128,
        "buffer_tokens": 0,
        "token_bytes": 0,
        "weights_bytes": 10**9,
        "draft_weights_bytes": 10**9,
    }


def rates(_model: str, **_options: Any) -> dict[str, Any]:
    return {"device_name": "toy", "read_gb_per_s": 100.0, "compute_capability": Script.capability}


def open_device(_model: str, *, device: str) -> None:
    """The toy's device needs no opening."""


def _begun(stage: str) -> None:
    if stages := os.environ.get("FAKE_NATIVE_STAGES"):
        with Path(stages).open("a") as file:
            file.write(f"{stage}\n")


def _sleep(seconds: float, progress: Progress | None) -> None:
    steps = max(1, round(seconds / 0.02)) if seconds else 1
    for step in range(steps):
        if seconds:
            time.sleep(seconds / steps)
        if progress:
            progress(step + 1, steps)


def install() -> None:
    """Makes this module `quantspec_cli._native`, for a child process."""
    Script.reset()
    module = sys.modules[__name__]
    assert isinstance(module, types.ModuleType)
    sys.modules["quantspec_cli._native"] = module
    quantspec_cli._native = module
