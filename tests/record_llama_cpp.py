"""Records what llama.cpp makes of GGUF files, for tests/test_llama_cpp.py: greedy tokens, log-probabilities, ids of texts.

    pip install xllamacpp==2026.10.11549 gguf==0.19.0
    python tests/record_llama_cpp.py                 writes tests/data/llama_cpp.json

The files are made here, from the demo model and from the tiny networks of crates/quantspec-model/tests/golden. The tests make
them again; their hashes must be those of the recording.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import add_byte_level, add_letters, write

from quantspec_cli import hub
from quantspec_cli.gguf import SPLITS

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "tests/data/llama_cpp.json"
GOLDEN = ROOT / "crates/quantspec-model/tests/golden"
DEMO = hub.demo()
SAMPLE = DEMO.with_name("sample.txt")
CONTEXT = 512
NEW_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """A GGUF file.

    Attributes:
        folder: the checkpoint that it is made of.
        mix: type of its matrices.
        config: the configuration's file.
        changes: fields of the configuration to replace.
        prompts: lengths of the prompts, in tokens.
    """

    folder: Path
    mix: str = "F32"
    config: str = "config.json"
    changes: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (5, 40)

    def write(self, path: Path) -> None:
        """Makes the file."""
        if self.folder == DEMO:
            tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
            write(path, DEMO, self.mix, lambda writer: add_byte_level(writer, tokenizer, "smollm"))
        else:
            write(path, self.folder, self.mix, add_letters, config=self.config, changes=self.changes)

    def ids(self) -> list[list[int]]:
        """The prompts."""
        if self.folder == DEMO:
            from tokenizers import Tokenizer

            found = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(SAMPLE.read_text(encoding="utf-8")).ids
            return [[1, *found[count : 2 * count - 1]] for count in self.prompts]
        return [[3 + (7 * at * at + 13 * at + count) % 60 for at in range(count)] for count in self.prompts]


LONG = {"max_position_embeddings": 1024}
CASES = {f"demo {mix}": Case(DEMO, mix, prompts=(12, 60, 400)) for mix in ("F16", "Q8_0", "Q4_1", "Q5_0", "Q4_K_M")} | {
    "llama": Case(GOLDEN / "llama-rope"),
    "llama linear": Case(GOLDEN / "llama-rope", config="linear.json"),
    "llama llama3": Case(GOLDEN / "llama-rope", config="llama3.json", prompts=(5, 300)),
    "llama yarn": Case(GOLDEN / "llama-rope", config="yarn.json", changes=LONG, prompts=(5, 300)),
    "mistral": Case(GOLDEN / "mistral"),
    "qwen2": Case(GOLDEN / "qwen2"),
    "qwen2 yarn": Case(GOLDEN / "qwen2", config="yarn.json", changes=LONG, prompts=(5, 300)),
    "qwen3": Case(GOLDEN / "qwen3"),
    "smollm3": Case(GOLDEN / "smollm3"),
    "granite": Case(GOLDEN / "granite"),
    "olmo2": Case(GOLDEN / "olmo2", changes={"num_attention_heads": 2}),
    "phi3": Case(GOLDEN / "phi3"),
    "phi3 longrope": Case(GOLDEN / "phi3-long"),
    "ministral3": Case(GOLDEN / "ministral3", changes=LONG, prompts=(5, 40, 300)),
    "gemma3": Case(GOLDEN / "gemma3", prompts=(5, 400)),
}

# Texts that pre-tokenizers split differently.
TEXTS = (
    "I'm sure IT'S 12345 HTTPServer's, can'T we'll...\n\n  e\u0301 \u00e9t\u00e9",
    "It was a dark\tand stormy  night;\r\n\r\n   the rain fell \u2014 in torrents (1,234,567.89 of them)!  \n",
    "for(int i=0;i<10;++i){a[i]^=~b|c&d;}//x_y-z\n\t\treturn $a@b.com/`q`;\n",
    "\u4e16\u754c\u4eba\u6c11 \u3053\u3093\u306b\u3061\u306f"
    "\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4\u3002\u300c\u4f60\u597d\u300d123\u4e16\u754c456",
    "\u0420\u043e\u0441\u0441\u0438\u044f \u0395\u03bb\u03bb\u03ac\u03b4\u03b1 "
    "\u0639\u0631\u0628\u064a\u060c \u0939\u093f\u0928\u094d\u0926\u0940\u0964 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "camelCaseWord XMLHttpRequest ABCdefGHI \u00c9COLE \u00c9cole \u01c5ungla \u0130stanbul",
    "\U0001f389\U0001f469\u200d\U0001f680 \u00bd\u00b2\u00b3 \u2167 \ufb01n \u00a0nbsp\u2003em  \u200bzero",
    " leading and trailing   ",
    "\n\n\n a\n b \n\n",
    "1 22 333 4444 55555 1a2b3c \u0661\u0662\u0663\u0664 \uff11\uff12",
    "<s>special</s> <|eot|> don't <pad>.",
    "",
)


def merges_of(texts: tuple[str, ...], count: int) -> list[tuple[bytes, bytes]]:
    """Most frequent pairs of neighbours, as BPE learns them, without a split into words: so that a split shows in the ids."""
    sequences = [[bytes([byte]) for byte in text.encode()] for text in texts]
    merges = []
    for _ in range(count):
        pairs = Counter(pair for sequence in sequences for pair in pairwise(sequence))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for sequence in sequences:
            at = 0
            while at + 1 < len(sequence):
                if (sequence[at], sequence[at + 1]) == best:
                    sequence[at : at + 2] = [best[0] + best[1]]
                at += 1
    return merges


def write_words(path: Path, kind: str, **flags: bool) -> None:
    """A small network with a vocabulary of the texts above: byte-level with the pre-tokenizer `kind`, or "llama"."""
    merges = merges_of(TEXTS, 400)
    if kind == "llama":
        write_pieces(path, merges, **flags)
        return
    from quantspec_cli.tokenizer import BYTE_ALPHABET

    def spelled(raw: bytes) -> str:
        return "".join(BYTE_ALPHABET[byte] for byte in raw)

    words = [spelled(bytes([byte])) for byte in range(256)]
    words += dict.fromkeys(spelled(left + right) for left, right in merges if spelled(left + right) not in words)
    special = ["<pad>", "<s>", "</s>"]
    vocab = {word: 3 + at for at, word in enumerate(words)}
    tokenizer = {
        "model": {"vocab": vocab, "merges": [" ".join(map(spelled, pair)) for pair in merges]},
        "added_tokens": [{"content": word, "id": id, "special": True} for id, word in enumerate(special)],
    }
    write_tiny(path, 3 + len(words), lambda writer: add_byte_level(writer, tokenizer, kind))


def write_pieces(path: Path, merges: list[tuple[bytes, bytes]], **flags: bool) -> None:
    """A SentencePiece vocabulary: a piece's score falls with its place."""
    whole = []
    for left, right in merges:
        try:
            whole.append((left + right).decode().replace(" ", "\u2581"))
        except UnicodeDecodeError:
            continue
    letters = sorted({letter for piece in whole for letter in piece} | {"\u2581"})
    # In Gemma's tokenizer, which puts no space before a text, runs of spaces are user-defined, and no other piece has one.
    runs = [] if flags.get("add_space_prefix", True) else ["\u2581" * count for count in (2, 3, 4)]
    words = [*letters, *(piece for piece in dict.fromkeys(whole) if piece not in letters)]
    words = [piece for piece in words if not runs or runs[0] not in piece]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *runs])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words), *[4] * len(runs)])
        writer.add_token_scores([0.0] * 259 + [-float(at) for at in range(len(words))] + [0.0] * len(runs))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in flags.items():
            getattr(writer, f"add_{name}")(value)

    write_tiny(path, 259 + len(words) + len(runs), add)


def write_tiny(path: Path, vocab: int, add_tokenizer: Any) -> None:
    """A network of one layer around a tokenizer."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, size in [("block_count", 1), ("context_length", 64), ("embedding_length", 32)]:
        getattr(writer, f"add_{name}")(size)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((vocab, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WORDS: dict[str, tuple[str, dict[str, bool]]] = {name: (name, {}) for name in SPLITS} | {
    "llama": ("llama", {}),
    "llama without prefix": ("llama", {"add_space_prefix": False, "add_bos_token": False}),
}


def digest(path: Path) -> str:
    """A file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def answers(path: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """llama.cpp's greedy tokens, each with its log-probability and its lead over the second-best token."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = str(path), CONTEXT, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity = -1
    server = xllamacpp.Server(params)
    found = []
    for prompt in prompts:
        asked = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0, "n_probs": 2, "cache_prompt": False}
        given = server.handle_completions(asked)["choices"][0]
        ends = given["finish_reason"] == "stop"
        # The token that ends a text is listed, too.
        steps = given["logprobs"]["content"][: -1 if ends else None]
        tops = [[one["logprob"] for one in step["top_logprobs"]] for step in steps]
        found.append(
            {
                "ends": ends,
                "tokens": [step["id"] for step in steps],
                "logprobs": [round(step["logprob"], 5) for step in steps],
                "leads": [round(best - second, 5) for best, second in tops],
            }
        )
    return found


class Library:
    """llama.cpp's tokenizer, by its C interface: the parameters of a model are passed by value, as they come."""

    class Params(ctypes.Structure):
        """At least as large as llama_model_params."""

        _fields_ = [("bytes", ctypes.c_byte * 1024)]

    def __init__(self) -> None:
        library = ctypes.CDLL(importlib.import_module("xllamacpp.xllamacpp").__file__)
        self._library = library
        library.llama_model_default_params.restype = self.Params
        for name, kinds in {
            "llama_model_load_from_file": [ctypes.c_char_p, self.Params],
            "llama_model_get_vocab": [ctypes.c_void_p],
        }.items():
            getattr(library, name).argtypes = kinds
            getattr(library, name).restype = ctypes.c_void_p
        library.llama_model_free.argtypes = [ctypes.c_void_p]
        library.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
            *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ]

    def ids(self, path: Path, texts: tuple[str, ...]) -> list[list[int]]:
        """Ids of texts, with the tokens around a text that the file asks for."""
        model = self._library.llama_model_load_from_file(str(path).encode(), self._library.llama_model_default_params())
        if not model:
            sys.exit(f"error: llama.cpp does not load {path}")
        vocab = self._library.llama_model_get_vocab(model)
        found = []
        for text in texts:
            raw, room = text.encode(), (ctypes.c_int32 * 1024)()
            count = self._library.llama_tokenize(vocab, raw, len(raw), room, len(room), True, True)
            found.append(list(room[:count]))
        self._library.llama_model_free(model)
        return found


def main() -> None:
    """Records."""
    recording: dict[str, Any] = {
        "xllamacpp": importlib.import_module("xllamacpp").__version__,
        "models": {},
        "words": {},
    }
    library = Library()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for name, (kind, flags) in WORDS.items():
            write_words(path, kind, **flags)
            recording["words"][name] = {"sha256": digest(path), "ids": library.ids(path, TEXTS)}
        for name, case in CASES.items():
            case.write(path)
            recording["models"][name] = {"sha256": digest(path), "answers": answers(path, case.ids())}
            sys.stderr.write(f"{name}\n")
    RECORDING.write_text(json.dumps(recording, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
