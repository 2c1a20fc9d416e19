"""GGUF files: the same tokens as safetensors with the same weights, tokenizers from metadata, and unusable files."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import DEMO, Outcome, copy_demo
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner
from tokenizers.models import BPE

from quantspec_cli import _native, fingerprint
from quantspec_cli.errors import ModelError
from quantspec_cli.gguf import models, parts
from quantspec_cli.model import Model
from quantspec_cli.tokenizer import Tokenizer

Run = Callable[..., Outcome]
Array = NDArray[Any]

TEXT = "It was a dark and stormy night; the rain fell in torrents, 12345 of them — naïve 世界 🎉\n\n  except"
CONFIG = json.loads((DEMO / "config.json").read_text())
HEADS, HIDDEN = CONFIG["num_attention_heads"], CONFIG["hidden_size"]
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"} | {
    f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight"
    for i in range(CONFIG["num_hidden_layers"])
    for theirs, ours in LAYER.items()
}


def demo_weights() -> dict[str, Array]:
    raw = (DEMO / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    weights = {}
    for name in NAMES:
        begin, end = header[name]["data_offsets"]
        bits = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.uint16).astype(np.uint32) << 16
        weights[name] = bits.view(np.float32).reshape(header[name]["shape"])
    return weights


def save_safetensors(folder: Path, weights: dict[str, Array], dtype: str) -> None:
    """Vectors in F32, matrices in a type."""
    stored = {}
    for name, values in weights.items():
        kind = "F32" if values.ndim == 1 else dtype
        match kind:
            case "BF16":
                data = (values.view(np.uint32) >> 16).astype(np.uint16)
            case "F16":
                data = values.astype(np.float16)
            case _:
                data = values
        stored[name] = (kind, data)
    save_tensors(folder, stored)


def save_tensors(folder: Path, tensors: dict[str, tuple[str, Array]]) -> None:
    """Writes model.safetensors: by name, a type and an array of its bits."""
    header, body = {}, b""
    for name, (kind, values) in tensors.items():
        data = np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def permuted(values: Array) -> Array:
    """Rows of queries or keys in the order of llama-architecture files."""
    per_head = values.reshape(HEADS, 2, values.shape[0] // HEADS // 2, values.shape[1])
    return per_head.swapaxes(1, 2).reshape(values.shape)


# Types that the `gguf` package reads but cannot encode: bytes of a block that are scales, and a scale that gives values of
# a network's usual size.
RANDOM_SCALES = {
    Kind.Q2_K: ((80, 82), 2e-3),
    Kind.Q3_K: ((108,), 5e-4),
    Kind.Q4_K: ((0, 2), 1e-4),
    Kind.Q5_K: ((0, 2), 5e-5),
    Kind.Q6_K: ((208,), 2e-5),
    Kind.IQ4_NL: ((0,), 5e-4),
    Kind.IQ4_XS: ((0,), 2e-5),
}


def random_blocks(values: Array, kind: Kind) -> Array:
    """Blocks of random codes."""
    rng = np.random.default_rng(values.size)
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // size, block_bytes), dtype=np.uint8)
    at, scale = RANDOM_SCALES[kind]
    for start in at:
        blocks[:, start : start + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(values.shape[0], -1)


def add_tokenizer(writer: Any, inner: Inner, *, pre: str, bos: int, eos: int, add_bos: bool | None) -> None:
    """Writes a byte-level tokenizer as llama.cpp's converter does."""
    spec = json.loads(inner.to_str())
    vocab = inner.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"]: token["special"] for token in spec["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([{None: 1, True: 3, False: 4}[special.get(token)] for token in tokens])
    merges = spec["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)


def write_demo(path: Path, kind: Kind, *, template: str | None = None, pre: str = "smollm") -> dict[str, Array]:
    """The demo model as GGUF, and its weights as the `gguf` package reads them.

    Types of RANDOM_SCALES have random codes. Matrices whose rows are not whole blocks are Q8_0.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    add_tokenizer(writer, Inner.from_file(str(DEMO / "tokenizer.json")), pre=pre, bos=1, eos=2, add_bos=True)
    if template is not None:
        writer.add_chat_template(template)
    read = {}
    for name, values in demo_weights().items():
        is_permuted = name.endswith(("q_proj.weight", "k_proj.weight"))
        stored = permuted(values) if is_permuted else values
        if values.ndim == 1:
            writer.add_tensor(NAMES[name], values)
            read[name] = values
            continue
        own = kind if values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.Q8_0
        raw = random_blocks(stored, own) if own in RANDOM_SCALES else gguf.quants.quantize(stored, own)
        writer.add_tensor(NAMES[name], raw, raw_dtype=own)
        known = gguf.quants.dequantize(raw, own).astype(np.float32).reshape(values.shape)
        if is_permuted:
            per_head = known.reshape(HEADS, values.shape[0] // HEADS // 2, 2, values.shape[1])
            known = per_head.swapaxes(1, 2).reshape(values.shape)
        read[name] = np.ascontiguousarray(known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo.F16.gguf"
    write_demo(path, Kind.F16)
    return path


def answer(quantspec: Run, model: Path, *options: str) -> dict[str, Any]:
    done = quantspec("run", "-m", str(model), "--text", TEXT, "-n", "24", "--ignore-eos", "--json", *options)
    assert done.code == 0, done
    result: dict[str, Any] = done.json
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS".split(),
)
def test_the_tokens_are_those_of_safetensors_with_the_same_weights(quantspec: Run, tmp_path: Path, kind: str) -> None:
    weights = write_demo(tmp_path / "model.gguf", Kind[kind])
    folder = copy_demo(tmp_path / "safetensors")
    save_safetensors(folder, weights, kind if kind in {"F32", "BF16"} else "F16")
    ours, theirs = answer(quantspec, tmp_path / "model.gguf"), answer(quantspec, folder)
    assert ours["results"][0]["tokens"] == theirs["results"][0]["tokens"]
    assert ours["results"][0]["text"] == theirs["results"][0]["text"]
    assert len(ours["results"][0]["tokens"]) == 24
    assert ours["stats"]["weights_bytes"] == theirs["stats"]["weights_bytes"]
    # Unquantised files contain the demo's weights, so their tokens are the demo's.
    if kind in {"F32", "BF16"}:
        assert all(np.array_equal(weights[name], values) for name, values in demo_weights().items())
    plain = answer(quantspec, tmp_path / "model.gguf", "--method", "ar")
    assert plain["results"][0]["tokens"] == ours["results"][0]["tokens"]
    if Kind[kind] not in RANDOM_SCALES:
        drafted = answer(quantspec, tmp_path / "model.gguf", "--gamma", "3")
        assert drafted["results"][0]["tokens"] == ours["results"][0]["tokens"]
        assert drafted["stats"]["accepted_tokens"] > 0


def test_dequantised_weights_are_noted(quantspec: Run, tmp_path: Path, f16: Path) -> None:
    write_demo(tmp_path / "demo.gguf", Kind.Q4_0)
    note = "quantised weights are dequantised; --weights int8 or int4"
    for model, flags, noted in (
        (tmp_path / "demo.gguf", (), True),
        (tmp_path / "demo.gguf", ("--weights", "int4"), False),
        (tmp_path / "demo.gguf", ("-q",), False),
        (f16, (), False),
    ):
        outcome = quantspec("run", "-m", str(model), "--text", TEXT, "-n", "2", *flags)
        assert (outcome.code, note in outcome.stderr) == (0, noted), outcome


def test_a_folder_with_one_file_is_that_model(quantspec: Run, tmp_path: Path, f16: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "demo.gguf").symlink_to(f16)
    (tmp_path / "mmproj-demo.gguf").write_bytes(b"")
    assert answer(quantspec, tmp_path)["results"] == answer(quantspec, f16)["results"]
    (tmp_path / "demo-Q8_0.gguf").symlink_to(f16)
    outcome = quantspec("run", "-m", str(tmp_path), "--text", "x")
    outcome.assert_error(1, "holds 2 GGUF models: demo-Q8_0.gguf, demo.gguf", str(tmp_path / "demo-Q8_0.gguf"))


def test_drafts_are_kept_and_found_again(quantspec: Run, tmp_path: Path, f16: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUANTSPEC_DRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr("quantspec_cli.settings.SMALLEST_DRAFTS_BYTES", 0)
    first = answer(quantspec, f16)
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("demo.F16.gguf-")
    known = kept.stat().st_mtime_ns, kept.read_bytes()
    assert answer(quantspec, f16)["results"] == first["results"]
    assert (kept.stat().st_mtime_ns, kept.read_bytes()) == known


def test_tokenizer_and_template_of_a_file_are_the_demos(tmp_path: Path, f16: Path) -> None:
    theirs, ours = Tokenizer(DEMO, 8192), Tokenizer(f16, 8192)
    for text in [TEXT, "", "<s> twice", *(TEXT[at:] for at in range(0, 90, 7))]:
        ids = ours.encode(text)
        # The demo's post-processor begins a text with <s> even if it is already there.
        assert ids == theirs.encode(text)[1 if text.startswith("<s>") else 0 :]
        assert ours.encode(text, special=False) == theirs.encode(text, special=False)
        assert [ours.token_bytes(id) for id in ids] == [theirs.token_bytes(id) for id in ids]
    assert ours.special == {"bos_token": "<s>", "eos_token": "</s>"}
    write_demo(tmp_path / "chat.gguf", Kind.Q4_0, template="{{ bos_token }}{{ messages[0].content }}")
    assert Tokenizer(tmp_path / "chat.gguf", 8192).config["chat_template"].startswith("{{ bos_token")


def test_an_instruction_goes_through_the_files_template(quantspec: Run, tmp_path: Path) -> None:
    write_demo(tmp_path / "chat.gguf", Kind.Q8_0, template="{{ bos_token }}{{ messages[0].content }}")
    done = quantspec("run", "-m", str(tmp_path / "chat.gguf"), "--text", "a", "--instruction", "b", "-n", "1", "--json")
    expected = Tokenizer(DEMO, 8192).encode("a\n\nb")
    assert done.json["results"][0]["prompt_tokens"] == len(expected)


def byte_level(pre: Any, *, whole: bool = False) -> Inner:
    """The demo's vocabulary with another word split."""
    spec = json.loads((DEMO / "tokenizer.json").read_text())
    inner = Inner(BPE(spec["model"]["vocab"], [tuple(m) for m in spec["model"]["merges"]], ignore_merges=whole))
    inner.pre_tokenizer = pre
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<pad>", "<s>", "</s>")])
    return inner


def header_only(path: Path, fill: Callable[[Any], None]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece(folder: Path, inner: Inner, **flags: bool) -> Path:
    """A SentencePiece tokenizer as llama.cpp's converter writes it: a piece's score falls with its index."""
    spec = json.loads(inner.to_str())
    vocab = inner.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"]: token["special"] for token in spec["added_tokens"]}

    def kind(token: str) -> int:
        if token in added:
            return 2 if token == "<unk>" else 3 if added[token] else 4
        return 6 if len(token) == 6 and token.startswith("<0x") else 1

    rank = {left + right: -float(place) for place, (left, right) in reversed(list(enumerate(spec["model"]["merges"])))}

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([rank.get(token, -1e6) for token in tokens])
        writer.add_token_types([kind(token) for token in tokens])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in flags.items():
            getattr(writer, f"add_{name}")(value)

    return header_only(folder / "sentencepiece.gguf", fill)


@pytest.fixture
def small() -> Inner:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrdtwspacn,"]
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("ll", "o"), ("▁he", "llo"), ("▁", "w")]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys([*pieces, *("".join(pair) for pair in merges)]))}
    inner = Inner(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def test_a_sentencepiece_tokenizer_has_the_ids_of_the_library(tmp_path: Path, small: Inner) -> None:
    tokenizer = Tokenizer(sentencepiece(tmp_path, small), small.get_vocab_size())
    for text in ["hello world", " hello  hello", "é 世界", "<s>hello</s>", ""]:
        expected = small.encode(text).ids
        assert tokenizer.encode(text, special=False) == expected
        assert tokenizer.encode(text) == (expected if expected[:1] == [1] else [1, *expected])
    ids = tokenizer.encode("hello é", special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " hello é".encode()
    assert tokenizer.answer_bytes(continues=False)(ids[0]) == b"hello"


def test_flags_of_a_sentencepiece_tokenizer(tmp_path: Path, small: Inner) -> None:
    path = sentencepiece(tmp_path, small, add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    tokenizer = Tokenizer(path, small.get_vocab_size())
    small.normalizer = normalizers.Replace(" ", "▁")
    assert tokenizer.encode("hello w") == [*small.encode("hello w").ids, 2]
    assert tokenizer.encode("hello w", special=False) == small.encode("hello w").ids


SPLITS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
    "default": (["I", "'", "m", " ", "123", "45", " HTTPServer", "...", "\n\n ", " e", "\u0301"], False, False),
    "refact": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        False,
        False,
    ),
    "llama-bpe": (["I", "'m", " ", "123", "45", " HTTPServer", "...\n\n", " ", " e", "\u0301"], True, True),
    "dbrx": (["I", "'m", " ", "123", "45", " HTTPServer", "...\n\n", " ", " e", "\u0301"], False, False),
    "qwen2": (["I", "'m", " ", "1", "2", "3", "4", "5", " HTTPServer", "...\n\n", " ", " é"], False, False),
    "tekken": (
        ["I", "'m", " ", "1", "2", "3", "4", "5", " HTTPServer", "...\n\n", " ", " e\u0301"],
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_texts_are_cut_into_words_by_name(tmp_path: Path, name: str) -> None:
    """The expected words follow from the published tokenizers' rules; each word is then tokenised separately."""
    words, begins, whole = SPLITS[name]
    plain = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), whole=whole)

    def fill(writer: Any) -> None:
        add_tokenizer(writer, plain, pre=name, bos=1, eos=2, add_bos=None)

    tokenizer = Tokenizer(header_only(tmp_path / "a.gguf", fill), 8192)
    text = "I'm 12345 HTTPServer...\n\n  e\u0301"
    if isinstance(words, list):
        expected = [id for word in words for id in plain.encode(word).ids]
    else:
        plain.pre_tokenizer = words
        expected = plain.encode(text).ids
    assert tokenizer.encode(text) == [1] * begins + expected


def test_metadata_that_no_tokenizer_has_is_not_read(tmp_path: Path) -> None:
    """A sparse file of some bytes on disk may have gigabytes of it."""
    path, names = (
        tmp_path / "sparse.gguf",
        [b"tokenizer.ggml.tokens", *(b"tokenizer.%d" % number for number in range(64))],
    )
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(names)))
        for name in names:
            elements = 1 if name == names[0] else 16_000_000
            file.write(struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 0, elements))  # a list of bytes
            file.truncate(file.tell() + elements)
            file.seek(0, os.SEEK_END)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert _native.gguf_metadata(str(path), ["tokenizer.ggml.tokens", "tokenizer.ggml.pre"]) == {
        "tokenizer.ggml.tokens": [0]
    }
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(expected: str, **changes: Any) -> None:
        entries: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
        entries |= {"token_type": [1, 1, 1], **changes}

        def fill(writer: Any) -> None:
            for key, value in entries.items():
                match value:
                    case None:
                        pass
                    case bool():
                        writer.add_bool(f"tokenizer.ggml.{key}", value)
                    case int():
                        writer.add_uint32(f"tokenizer.ggml.{key}", value)
                    case str():
                        writer.add_string(f"tokenizer.ggml.{key}", value)
                    case _:
                        writer.add_array(f"tokenizer.ggml.{key}", value)

        with pytest.raises(ModelError) as caught:
            Tokenizer(header_only(tmp_path / "a.gguf", fill), 3)
        assert expected in caught.value.message

    refused("pre-tokenizer 'falcon'", pre="falcon")
    refused("has no metadata tokenizer.ggml.pre", pre=None)
    refused("tokenizer of kind bert", model="bert")
    refused("metadata tokenizer.ggml.model that is not of type str", model=3)
    refused("has no metadata tokenizer.ggml.tokens", tokens=None)
    refused("metadata tokenizer.ggml.tokens that is not a list of type str", tokens=[1, 2, 3])
    refused("has 2 tokens and 3 types", tokens=["a", "ab"])
    refused("has the token 'a' twice, as 0 and 1", tokens=["a", "a", "ab"])
    refused("has the merge 'ab' of one piece", merges=["ab"])
    refused("cannot be read", merges=["a c"])
    refused("bos_token_id 3 and 3 tokens", bos_token_id=3)
    refused("add_bos_token and no BOS", add_bos_token=True)
    refused("has 3 tokens and 1 scores", model="llama", scores=[1.0])
    refused("has no unknown token and 0 of 256 bytes", model="llama", scores=[1.0, 1.0, 1.0])


def test_files_that_cannot_be_used(quantspec: Run, tmp_path: Path, f16: Path) -> None:
    bad = tmp_path / "bad.gguf"
    raw = f16.read_bytes()
    for contents, words in [
        (b"", ["is not a GGUF file"]),
        (raw[:1000], ["claims"]),
        (raw[:-1000], ["of which the file has"]),
        (raw[:4] + struct.pack(">I", 3) + raw[8:], ["big-endian"]),
        (raw[:8] + struct.pack("<Q", 1 << 63) + raw[16:], ["9223372036854775808 tensors"]),
    ]:
        bad.write_bytes(contents)
        quantspec("run", "-m", str(bad), "--text", "x").assert_error(1, *words)
    quantspec("run", "-m", str(tmp_path / "none.gguf"), "--text", "x").assert_error(1, "model file", "does not exist")
    bad.unlink()
    write_demo(bad, Kind.Q8_0, pre="falcon")
    quantspec("run", "-m", str(bad), "--text", "x").assert_error(1, "falcon", "supported are")


def test_a_split_model_is_named_by_its_first_part() -> None:
    names = ["b-Q8_0.gguf", "README.md", "a/x-00001-of-00002.gguf", "a/x-00002-of-00002.gguf", "mmproj-x.gguf"]
    assert models([*names, "x-imatrix.gguf"]) == ["a/x-00001-of-00002.gguf", "b-Q8_0.gguf"]
    assert models(names[3:]) == ["a/x-00001-of-00002.gguf"]
    assert parts("a/x-00001-of-00002.gguf") == ["a/x-00001-of-00002.gguf", "a/x-00002-of-00002.gguf"]
    # Names that no splitter writes are files of their own.
    for name in ("x-00001-of-00000.gguf", "x-00003-of-00002.gguf"):
        assert (parts(name), models([name])) == ([name], [name])
    assert parts("b.gguf") == ["b.gguf"]


def test_a_missing_first_part_is_named(quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "x-00002-of-00002.gguf").write_bytes(b"GGUF")
    for command in (["run", "--text", "x"], ["plan"]):
        quantspec(*command, "-m", str(tmp_path)).assert_error(1, "x-00001-of-00002.gguf is missing", "incomplete")


def test_the_fingerprint_of_a_split_model_is_of_all_parts(tmp_path: Path) -> None:
    """The first part may hold metadata only."""
    first, second = (tmp_path / name for name in parts("x-00001-of-00002.gguf"))
    model = replace(Model.open(), directory=first)
    first.write_bytes(b"metadata")
    second.write_bytes(b"weights")
    before = fingerprint.of_model(model)
    assert fingerprint.of_model(model) == before
    second.write_bytes(b"others!")
    assert fingerprint.of_model(model) != before
