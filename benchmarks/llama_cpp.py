#!/usr/bin/env python3
"""Compare quantspec with llama.cpp: the same GGUF files on the same cores, in turn, in one run.

    pip install xllamacpp==2026.10.11549 gguf==0.19.0     llama.cpp for CPUs, and the writer of the files
    python benchmarks/llama_cpp.py [FILE.gguf ...]        measure, write results/llama_cpp.json
    python benchmarks/llama_cpp.py --quick                the same in a minute on a small model, without a file
    python benchmarks/page.py                             render docs/benchmarks.md

The files are the demo model widened to the shape of a 1B model (Q8_0, Q4_1, Q4_K_M), and those given. The programs alternate.
A number of decoding is the median of its repetitions at one memory bandwidth, a ratio one of such medians. Prompts depend on
arithmetic, so theirs is the median of all repetitions.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = "xllamacpp==2026.10.11549 gguf==0.19.0"
try:
    import gguf
    import numpy as np
    from gguf import GGMLQuantizationType as Kind

    from quantspec_cli import _native

    # Without type annotations, so mypy does not follow it.
    xllamacpp = importlib.import_module("xllamacpp")
    library = importlib.import_module("xllamacpp.xllamacpp")
except ImportError as error:
    sys.exit(f"error: {error}\nhint: pip install {PACKAGES}")

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/llama_cpp.json"
KINDS = ("Q8_0", "Q4_1", "Q4_K_M")
METHODS = "ar-int8,quantspec"
# Tokens of the prompts whose processing is timed.
PROMPT = 512
# Rounds of both engines at most, and the number of samples of each at one memory bandwidth that ends them.
ROUNDS = 4
ENOUGH = 2

# Names in GGUF: of a layer's tensors, then of the others.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Quantiser:
    """ggml's quantiser, exported by xllamacpp's library: the `gguf` package makes no k-quants."""

    def __init__(self) -> None:
        self._chunk = ctypes.CDLL(library.__file__).ggml_quantize_chunk
        self._chunk.restype = ctypes.c_size_t
        self._chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def __call__(self, values: Any, kind: Kind) -> Any:
        """Rows of blocks, uint8, of a float32 matrix."""
        rows, columns = values.shape
        size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.zeros((rows, columns // size * block_bytes), np.uint8)
        values = np.ascontiguousarray(values, np.float32)
        written = self._chunk(int(kind), values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
        if written != out.size:
            sys.exit(f"error: ggml wrote {written} bytes of {out.size} as {kind.name}")
        return out


def kind_of(name: str, columns: int, layers: int, mix: str) -> Kind:
    """The type that llama.cpp gives a matrix in a file of this kind."""
    if mix != "Q4_K_M":
        return Kind.Q8_0 if name in {"output.weight", "token_embd.weight"} else Kind[mix]
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    # llama.cpp's use_more_bits.
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    better = name == "output.weight" or (("attn_v" in name or "ffn_down" in name) and more)
    if columns % 256:
        return Kind.Q8_0 if better else Kind.Q5_0
    return Kind.Q6_K if better else Kind.Q4_K


def named(tensor: str) -> str:
    """A tensor's name in GGUF."""
    stem = tensor.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return OTHERS[stem] + ".weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER[part]}.weight"


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names in GGUF and float32 values of a checkpoint in BF16."""
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            bits = np.frombuffer(file.read(end - begin), np.uint16).astype(np.uint32) << 16
            yield named(name), bits.view(np.float32).reshape(entry["shape"])


def write_gguf(folder: Path, path: Path, mix: str, quantise: Quantiser) -> None:
    """A Llama checkpoint with a byte-level tokenizer, as llama.cpp's converter and quantiser write it."""
    config = json.loads((folder / "config.json").read_text())
    spec = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    layers = config["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    vocab = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    special = {token["content"] for token in spec["added_tokens"]}
    names = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in special else 1 for name in names])
    merges = spec["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    for name, stored in tensors(folder):
        values = stored
        if values.ndim == 1:
            writer.add_tensor(name, values.copy())
            continue
        if "attn_q" in name or "attn_k" in name:
            # In files of this architecture, channels that RoPE rotates together are adjacent.
            heads = values.shape[0] // config["head_dim"]
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = kind_of(name, values.shape[1], layers, mix)
        writer.add_tensor(name, quantise(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp with one file, in a separate process that sleeps between measurements."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", str(path), str(context), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def decode(self, depth: int, tokens: int) -> float:
        """Tokens per second after a prompt of `depth` tokens, which is processed once."""
        return self._ask(f"{depth} 0 {tokens}")[1]

    def prompt(self, depth: int) -> float:
        """Tokens per second of a new prompt of `PROMPT` tokens after `depth` tokens that are processed already."""
        return self._ask(f"{depth} {PROMPT} 1")[0]

    def _ask(self, question: str) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("measured "):
                _, prompt, decode = line.split()
                return float(prompt), float(decode)
        sys.exit(f"error: llama.cpp ended with exit status {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(path: str, context: int, threads: int) -> None:
    """The process of `LlamaCpp`: reads lines "depth new tokens" from stdin, and writes tokens per second of the prompt and
    of the answer to stdout.
    """
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    for count, line in enumerate(sys.stdin):
        depth, new, tokens = map(int, line.split())
        # Speed does not depend on the tokens. The first `depth` are always the same, so they are processed once.
        prompt = [3 + index * 7919 % 4000 for index in range(depth if new else max(depth, 1))]
        prompt += [3 + (count + index) * 7907 % 4000 for index in range(new)]
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        timings = server.handle_completions(asked)["timings"]
        sys.stdout.write(f"measured {timings['prompt_per_second']} {timings['predicted_per_second']}\n")
        sys.stdout.flush()


def quantspec(path: Path, weights: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of `quantspec bench`."""
    command = [sys.executable, "-m", "quantspec_cli", "bench", "-m", str(path), "--weights", weights, "--json"]
    command += ["-p", str(PROMPT), "-n", str(options.tokens), "-d", ",".join(map(str, options.depths))]
    command += ["-r", str(options.repetitions), "--methods", METHODS, "--device", "cpu", "-t", str(options.threads)]
    rows: list[dict[str, Any]] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return rows


def bandwidth() -> float:
    """GB/s that this machine reads now."""
    return float(_native.doctor()["cpu"]["read_gb_per_s"])


# Tokens per second, and GB/s around them.
Samples = list[tuple[float, float]]


def common(samples: dict[str, Samples]) -> tuple[float, dict[str, list[float]]]:
    """The memory bandwidth at which each engine has most samples, and each engine's tokens per second within 10 % of it."""

    def near(speed: float) -> dict[str, list[float]]:
        return {
            engine: [found for found, at in of_engine if abs(at / speed - 1) < 0.1]
            for engine, of_engine in samples.items()
        }

    speeds = [at for of_engine in samples.values() for _, at in of_engine]
    best = max(speeds, key=lambda speed: sorted(map(len, near(speed).values())))
    return best, near(best)


def compare(path: Path, weights: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one file. The memory bandwidth of a shared machine changes, so the engines alternate until each has `ENOUGH`
    samples at one bandwidth, for at most `ROUNDS` rounds. The rows are medians of these samples.
    """
    sys.stderr.write(f"measuring {path.name} in {weights}\n")
    peer = LlamaCpp(path, max(options.depths) + PROMPT + options.tokens + 64, options.threads)
    samples: dict[int, dict[str, Samples]] = {depth: {} for depth in options.depths}
    prompts: dict[int, dict[str, list[float]]] = {depth: {} for depth in options.depths}
    accepted: dict[int, float | None] = {}
    for _ in range(ROUNDS):
        for depth in options.depths:
            peer.decode(depth, 8)
            for _ in range(options.repetitions):
                if len(prompts[depth].setdefault("llama.cpp", [])) < ENOUGH:
                    prompts[depth]["llama.cpp"].append(peer.prompt(depth))
                before = bandwidth()
                found = peer.decode(depth, options.tokens)
                samples[depth].setdefault("llama.cpp", []).append((found, (before + bandwidth()) / 2))
        for row in quantspec(path, weights, options):
            speeds = [1e3 / ms for ms in row["samples_ms_per_token"]]
            if row["n_prompt"]:
                prompts[row["n_depth"]].setdefault("quantspec", []).extend(speeds)
                continue
            pairs = zip(speeds, row["samples_bandwidth_gb_per_s"], strict=True)
            samples[row["n_depth"]].setdefault(row["method"], []).extend(pairs)
            accepted[row["n_depth"]] = row["acceptance_rate"] or accepted.get(row["n_depth"])
        if all(len(found) >= ENOUGH for depth in options.depths for found in common(samples[depth])[1].values()):
            break
    peer.close()
    rows: list[dict[str, Any]] = []
    for depth in options.depths:
        at, by_engine = common(samples[depth])
        median = {engine: statistics.median(speeds) if speeds else None for engine, speeds in by_engine.items()}
        peer_speed = median["llama.cpp"]
        for engine, speed in median.items():
            rows.append(
                {
                    "engine": engine,
                    "depth": depth,
                    "gb_per_s": at,
                    "samples": len(by_engine[engine]),
                    "tokens_per_s": speed,
                    "ratio": speed / peer_speed if speed and peer_speed else None,
                    "acceptance_rate": accepted[depth] if engine == "quantspec" else None,
                }
            )
    speeds = [
        {"depth": depth} | {name: statistics.median(of) for name, of in prompts[depth].items()} for depth in prompts
    ]
    return {"file": path.name, "bytes": path.stat().st_size, "weights": weights, "rows": rows, "prompts": speeds}


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description="Measure quantspec and llama.cpp on the same GGUF files.")
    parser.add_argument("files", nargs="*", type=Path, help="more GGUF files, each measured in int8 and in int4")
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens, printed and not written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]), int(options.serve[2]))
        return
    from run import build_commit  # noqa: PLC0415 - found only if this file is the program

    commit = _native.COMMIT if options.quick else build_commit()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    # As long as a summary: the γ policy measures in an answer's first tokens.
    options.depths, options.tokens, options.repetitions = ([0, 512], 16, 2) if options.quick else ([0, 4096], 256, 2)
    times, layers = ("2", "6") if options.quick else ("8", "12")
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide"
        widen = [sys.executable, "tools/widen.py", "python/quantspec_cli/demo", str(wide)]
        subprocess.run([*widen, "--times", times, "--layers", layers], check=True, cwd=ROOT, stdout=subprocess.PIPE)
        quantise, cases = Quantiser(), []
        for mix in KINDS:
            path = Path(folder) / f"demo-widened.{mix}.gguf"
            write_gguf(wide, path, mix, quantise)
            cases.append(compare(path, "int8" if mix == "Q8_0" else "int4", options))
            path.unlink()
        cases += [compare(path, weights, options) for path in options.files for weights in ("int8", "int4")]
    measured = {
        "commit": commit,
        "device_name": json.loads(
            subprocess.run(
                [sys.executable, "-m", "quantspec_cli", "doctor", "--json"], check=True, stdout=subprocess.PIPE
            ).stdout
        )["cpu"]["name"],
        "threads": options.threads,
        "xllamacpp": xllamacpp.__version__,
        "widened": {"times": int(times), "layers": int(layers)},
        "cases": cases,
    }
    text = json.dumps(measured, indent=1) + "\n"
    if options.quick:
        sys.stdout.write(text)
    else:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
