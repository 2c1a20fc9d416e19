"""Encoding with a model's own special tokens, once; decoding to a token's exact bytes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Outcome, copy_demo
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner

from quantspec_cli import panics
from quantspec_cli.errors import DoesNotFitError, InputError, ModelError, UsageError
from quantspec_cli.text import Text
from quantspec_cli.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "  two spaces, and a tab\tand\n\nbreaks ",
    "naïve café — “quotes” 世界 🎉👩‍👩‍👧 e\u0301",
    "1234567890 <s> </s>",
]


def sentencepiece(bos: bool = True) -> Inner:
    """A small tokenizer built like Llama 2's: ▁ for spaces, byte tokens for unknown characters."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"helowrdtwspacn,",
        "▁he",
        "llo",
    ]
    merges = [("▁", "h")]
    pieces += ["▁h"]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    inner = Inner(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def saved(inner: Inner, folder: Path, **config: Any) -> Tokenizer:
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder, inner.get_vocab_size())


@pytest.mark.parametrize("kind", ["demo", "sentencepiece"])
def test_the_start_of_a_text_has_the_ids_of_the_whole(
    demo: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer = demo if kind == "demo" else saved(sentencepiece(), tmp_path)
    text = "".join(TEXTS) * 2000
    whole, encode, seen = tokenizer.encode(text), tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda text: seen.append(len(text)) or encode(text))
    for count in (2, 7, 100, 1001):
        assert tokenizer.encode_start(text, count) == whole[:count]
        assert seen.pop() == min(len(text), 4 * count * tokenizer.longest_token_bytes)
        assert not seen
    assert tokenizer.encode_start(text, len(whole) + 5) == whole
    assert tokenizer.encode_start("", 5) == encode("")


def test_a_start_with_few_ids_is_not_used_as_a_bound(tmp_path: Path) -> None:
    inner = sentencepiece()
    # The normaliser removes the beginning of the text.
    inner.normalizer = normalizers.Replace("#", "")
    tokenizer = saved(inner, tmp_path)
    text = "#" * 10_000 + "hello world"
    assert tokenizer.encode_start(text, 5) == tokenizer.encode("hello world")[:5]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(DEMO, 8192)


def answer(tokenizer: Tokenizer, ids: list[int], *, continues: bool) -> str:
    text = Text(tokenizer.answer_bytes(continues=continues), limit=len(ids) + 1)
    text.push(ids)
    return text.text


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_text_survives_token_by_token(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text)
    assert ids[0] == 1
    visible = text.replace("<s>", "").replace("</s>", "")  # special tokens are no text
    assert answer(demo, ids, continues=True) == visible


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_demo_tokenizer(demo: Tokenizer, text: str) -> None:
    expected = text.replace("<s>", "").replace("</s>", "").replace("<pad>", "")
    assert answer(demo, demo.encode(text), continues=True) == expected


@pytest.mark.parametrize("text", TEXTS[:3])
def test_a_sentencepiece_text_survives_token_by_token(tmp_path: Path, text: str) -> None:
    inner = sentencepiece()
    tokenizer = saved(inner, tmp_path)
    ids = tokenizer.encode(text)
    assert answer(tokenizer, ids, continues=False) == inner.decode(ids) == text


def test_a_continuation_keeps_the_space_before_its_first_word(tmp_path: Path) -> None:
    tokenizer = saved(sentencepiece(), tmp_path)
    ids = tokenizer.encode("hello world")[1:]
    assert answer(tokenizer, ids, continues=True) == " hello world"
    assert answer(tokenizer, ids, continues=False) == "hello world"


def test_bos_comes_from_the_post_processor_or_the_config_but_never_twice(tmp_path: Path) -> None:
    with_processor = saved(sentencepiece(), tmp_path, add_bos_token=True, bos_token="<s>")
    assert with_processor.encode("hello").count(1) == 1
    from_config = saved(sentencepiece(bos=False), tmp_path, add_bos_token=True, bos_token={"content": "<s>"})
    assert from_config.encode("hello")[0] == 1
    without = saved(sentencepiece(bos=False), tmp_path, add_bos_token=False, bos_token="<s>")
    assert 1 not in without.encode("hello")
    assert 1 not in from_config.encode("hello", special=False)
    assert 1 not in saved(sentencepiece(bos=False), tmp_path, add_bos_token=True).encode("hello")


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    tokens = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "additional_special_tokens": ["<a>"],
    }
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert saved(sentencepiece(), tmp_path).special == {"bos_token": "<s>", "eos_token": "</s>"}
    # tokenizer_config.json decides, and lists all tokens if it lists any.
    assert saved(sentencepiece(), tmp_path, eos_token="<unk>").special == {"bos_token": "<s>", "eos_token": "<unk>"}
    assert saved(sentencepiece(), tmp_path, bos_token=None).special == {"eos_token": "</s>"}
    assert saved(sentencepiece(), tmp_path, added_tokens_decoder={}).special == {}


def test_a_bos_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json has no token '<begin>', the BOS"):
        saved(sentencepiece(), tmp_path, add_bos_token=True, bos_token="<begin>")
    # A BOS that is not added need not exist.
    assert saved(sentencepiece(), tmp_path, add_bos_token=False, bos_token="<begin>").encode("hello").count(1) == 1


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    inner = sentencepiece()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    tokenizer = saved(inner, tmp_path)
    ids = tokenizer.encode("hello world hello world")
    assert answer(tokenizer, ids, continues=False) == "hello world hello world"
    assert len(ids) < 64


def test_dropout_of_the_file_is_ignored(demo: Tokenizer, tmp_path: Path) -> None:
    text = " ".join(TEXTS) * 20
    written = json.loads((DEMO / "tokenizer.json").read_text())
    written["model"]["dropout"] = 0.5
    assert saved(Inner.from_str(json.dumps(written)), tmp_path).encode(text) == demo.encode(text)


def test_added_tokens_are_text_unless_special(tmp_path: Path) -> None:
    inner = Inner.from_file(str(DEMO / "tokenizer.json"))
    inner.add_tokens([AddedToken("<think>"), AddedToken("α β")])
    inner.add_special_tokens(["<|end|>"])
    tokenizer = saved(inner, tmp_path)
    assert answer(tokenizer, tokenizer.encode("a<think>b α β<|end|>c"), continues=True) == "a<think>b α βc"


def test_a_word_level_tokenizer_joins_words(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = saved(inner, tmp_path)
    assert (
        answer(tokenizer, tokenizer.encode("one two one"), continues=False) == inner.decode([1, 2, 1]) == "one two one"
    )


def test_ids_beyond_the_tokenizer_decode_to_nothing(demo: Tokenizer) -> None:
    assert demo.token_bytes(9000) == b""


def test_another_kind_of_decoder_is_refused_by_name(tmp_path: Path) -> None:
    inner = sentencepiece()
    for decoder, name in (
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Replace(Regex("▁+"), " "), r"Replace \(Regex\)"),
    ):
        inner.decoder = decoder
        with pytest.raises(ModelError, match=f"a decoder of type {name} "):
            saved(inner, tmp_path)


def test_a_prefix_of_subwords_is_refused(fake: Any, quantspec: Any, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model")
    written = json.loads((DEMO / "tokenizer.json").read_text())
    written["model"]["continuing_subword_prefix"] = "x"
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").write_text(json.dumps(written, indent=1))
    outcome: Outcome = quantspec("run", "--model", str(model), "--text", "x")
    outcome.assert_error(1, 'tokenizer.json has the continuing_subword_prefix "x"', "supported are")
    written["model"]["continuing_subword_prefix"] = ""
    (model / "tokenizer.json").write_text(json.dumps(written, indent=1))
    assert quantspec("run", "--model", str(model), "--text", "x", "-n", "2").code == 0


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"8192 tokens.*20000"):
        Tokenizer(DEMO, 20_000)
    larger = Tokenizer(DEMO, 5000)
    with pytest.raises(ModelError, match=r"produces token id \d+.*5000"):
        larger.encode(" ".join(TEXTS) + " extraordinarily")


def test_a_text_the_tokenizer_fails_on_is_one_error(tmp_path: Path) -> None:
    inner = Inner(models.Unigram([("a", -1.0)], unk_id=None, byte_fallback=False))
    inner.decoder = decoders.ByteLevel()
    tokenizer = saved(inner, tmp_path)
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot encode the text"):
        tokenizer.encode("ab")


def test_what_is_no_text_is_not_encoded(demo: Tokenizer) -> None:
    with pytest.raises(InputError, match="the text is not UTF-8: character 1 is half of a pair"):
        demo.encode("a\ud800")
    for value in (None, b"a", ["a"]):
        with pytest.raises(UsageError, match="the text is "):
            demo.encode(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            ("tokenizer.json", content)
            for content in ["", "{", "[]", '{"model": {"type": "BPE"}}', "\0\0", '{"version": "1.0"}']
        ),
        *(("tokenizer_config.json", content) for content in ["", "{", "[]", "[" * 100_000]),
    ],
)
def test_a_damaged_tokenizer_file_is_one_error(
    fake: Any, quantspec: Any, tmp_path: Path, name: str, content: str
) -> None:
    model = copy_demo(tmp_path / "model")
    (model / name).unlink()
    (model / name).write_text(content)
    outcome: Outcome = quantspec("run", "--model", str(model), "--text", "x")
    outcome.assert_error(1, name)


@pytest.mark.parametrize(
    ("part", "damage", "words"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "cannot be read: Precompiled"),
        ("normalizer", {"type": "Prepend", "prepend": ""}, "cannot encode the text: index out of bounds"),
    ],
)
def test_a_panic_of_the_library_is_one_error_of_the_model(
    fake: Any, quantspec: Any, tmp_path: Path, part: str, damage: Any, words: str
) -> None:
    model = copy_demo(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    written = json.loads((DEMO / "tokenizer.json").read_text()) | {part: damage}
    (model / "tokenizer.json").write_text(json.dumps(written))
    command = ("run", "--model", str(model), "--text", "Hello world")
    quantspec(*command).assert_error(1, f"tokenizer.json {words}", "published")
    assert quantspec(*command, "--json").json["error"]["kind"] == "model"


def test_other_threads_output_during_encoding_appears(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Inner:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
            os.write(2, b"from elsewhere\n")
            return inner.encode_batch_fast(texts, **options)

    inner = demo._inner
    monkeypatch.setattr(demo, "_inner", Inner())
    sys.stderr.write("before\n")
    with panics.of_command():
        demo.encode("x")
    sys.stderr.write("after\n")
    assert capfd.readouterr().err == "before\nfrom elsewhere\nafter\n"


def test_a_program_keeps_its_standard_error(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that another thread starts meanwhile inherits it, and a fork."""

    class Inner:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
            found.append(Path("/proc/self/fd/2").readlink())
            return inner.encode_batch_fast(texts, **options)

    inner, found = demo._inner, [Path("/proc/self/fd/2").readlink()]
    monkeypatch.setattr(demo, "_inner", Inner())
    demo.encode("x")
    assert found == found[:1] * 2


def test_ctrl_c_while_a_text_is_encoded_has_its_standard_error(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Inner:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            done.wait(timeout=30)

    done = threading.Event()
    monkeypatch.setattr(demo, "_inner", Inner())
    with pytest.raises(KeyboardInterrupt), panics.of_command():
        demo.encode("x")
    os.write(2, b"interrupted\n")
    done.set()
    assert capfd.readouterr().err == "interrupted\n"


def test_a_system_without_threads_is_not_the_tokenizers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Threadless:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise RuntimeError("The global thread pool has not been initialized.: ThreadPoolBuildError { kind: … }")

    tokenizer = Tokenizer(DEMO, 8192)
    monkeypatch.setattr(tokenizer, "_inner", Threadless())
    with pytest.raises(DoesNotFitError, match="starts no further thread"):
        tokenizer.encode("one")


def test_half_of_a_pair_in_the_tokenizer_config_is_one_error(fake: Any, quantspec: Any, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model")
    (model / "tokenizer_config.json").unlink()
    for config in ({"bos_token": "\ud83c", "add_bos_token": True}, {"chat_template": "\udc00"}):
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        outcome: Outcome = quantspec("run", "--model", str(model), "--text", "x")
        outcome.assert_error(1, "tokenizer_config.json holds \\ud", "published")


def test_a_pipe_instead_of_tokenizer_config_is_one_error(fake: Any, quantspec: Any, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model")
    (model / "tokenizer_config.json").unlink()
    os.mkfifo(model / "tokenizer_config.json")
    quantspec("run", "--model", str(model), "--text", "x").assert_error(1, "tokenizer_config.json is not a file")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_a_dangling_link_is_not_a_missing_file(fake: Any, quantspec: Any, tmp_path: Path, name: str) -> None:
    # The state of a half-pruned hub cache.
    model = copy_demo(tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../../blobs/4e20")
    outcome: Outcome = quantspec("run", "--model", str(model), "--text", "x", "--instruction", "y")
    outcome.assert_error(1, f"{model / name} is a link to ../../blobs/4e20, which does not exist", "restore")
    document = quantspec("run", "--model", str(model), "--text", "x", "--instruction", "y", "--json").json
    assert document["error"]["kind"] == "io"


def test_a_missing_tokenizer_is_one_error(fake: Any, quantspec: Any, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    quantspec("run", "--model", str(model), "--text", "x").assert_error(1, "has no tokenizer.json")
    for other, remedy in {"tekken.json": "tekken.json, which is not read", "vocab.json": "vocab.json; convert"}.items():
        (model / other).touch()
        quantspec("run", "--model", str(model), "--text", "x").assert_error(1, "has no tokenizer.json", remedy)
