"""tools/widen.py: the widened checkpoint computes the same as its source, and is labelled."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import llama_numpy
import numpy as np
import pytest
from conftest import copy_demo, tool

from quantspec_cli import _native, hub


@pytest.fixture(scope="module")
def widen() -> ModuleType:
    return tool("widen")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """An F32 checkpoint; its tokenizer is not used."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header, body = {}, b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A random model with every optional part of a source: grouped heads, untied head, biases, q/k norms."""
    random = np.random.default_rng(7)
    hidden, ffn, heads, kv_heads, dim, vocab, layers = 24, 40, 4, 2, 8, 50, 2
    config = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    shapes = {"self_attn.q_proj": (heads * dim, hidden), "self_attn.o_proj": (hidden, heads * dim)}
    shapes |= {f"self_attn.{name}_proj": (kv_heads * dim, hidden) for name in "kv"}
    shapes |= {f"mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")} | {"mlp.down_proj": (hidden, ffn)}
    tensors = {
        "model.embed_tokens.weight": random.normal(size=(vocab, hidden)),
        "lm_head.weight": random.normal(size=(vocab, hidden)),
        "model.norm.weight": 1 + random.normal(size=hidden) / 10,
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = random.normal(size=(rows, columns)) / np.sqrt(columns)
            tensors[f"{prefix}{name}.bias"] = random.normal(size=rows) / 10
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + random.normal(size=hidden) / 10
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = 1 + random.normal(size=dim) / 10
    return write(tmp_path / "strange", config, tensors)


def logits(folder: Path, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return llama_numpy.Llama(*llama_numpy.load(folder)).forward(ids)


@pytest.mark.slow
def test_logits_are_the_sources(widen: ModuleType, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(3, 8192, 24)
    out = tmp_path / "wide"
    assert widen.main([str(hub.demo()), str(out), "--times", "2", "--layers", "8"]) == 0
    # Division by a power of two is exact in BF16: only the order of sums in float64 differs.
    np.testing.assert_allclose(logits(out, ids), logits(hub.demo(), ids), rtol=0, atol=1e-9)


@pytest.mark.parametrize("times", [2, 3])
def test_every_part_of_a_layer_is_preserved(widen: ModuleType, strange: Path, tmp_path: Path, times: int) -> None:
    ids = np.arange(20) * 7 % 50
    out = tmp_path / "wide"
    assert widen.main([str(strange), str(out), "--times", str(times), "--layers", "3"]) == 0
    # A third is not a binary fraction: weights are rounded to F32 once.
    np.testing.assert_allclose(logits(out, ids), logits(strange, ids), rtol=0, atol=1e-9 if times == 2 else 1e-5)


def test_the_result_is_larger_and_labelled(widen: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    assert widen.main([str(hub.demo()), str(out), "--times", "2", "--layers", "7"]) == 0
    config, tensors = llama_numpy.load(out)
    source = json.loads((hub.demo() / "config.json").read_text())
    assert config["widened"] == {"source": "demo", "times": 2, "source_layers": 6}
    assert "widened" in (out / "README.md").read_text()
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert config[key] == 2 * source[key]
    assert (config["head_dim"], config["num_hidden_layers"]) == (128, 7)
    assert tensors["model.layers.6.mlp.down_proj.weight"].shape == (512, 1408)
    assert not tensors["model.layers.6.mlp.down_proj.weight"].any()
    assert not tensors["model.layers.6.self_attn.o_proj.weight"].any()
    # A layer that adds nothing has full-sized weights to read.
    assert tensors["model.layers.6.mlp.up_proj.weight"].any()
    assert (out / "tokenizer.json").read_bytes() == (hub.demo() / "tokenizer.json").read_bytes()
    assert not list(out.glob("*.partial"))


@pytest.mark.slow
def test_the_engine_scores_it_as_the_source(widen: ModuleType, tmp_path: Path) -> None:
    from quantspec_cli import _native

    out = tmp_path / "wide"
    assert widen.main([str(hub.demo()), str(out), "--times", "2", "--layers", "6"]) == 0
    ids = [1, *(int(id) for id in np.random.default_rng(2).integers(3, 8192, 63))]
    source, wide = (_native.evaluate(str(folder), ids) for folder in (hub.demo(), out))
    # Kernels may round activations to BF16 (2⁻⁹ each), at other points of the wider sums.
    assert wide["targets"]["int8"]["nll"] == pytest.approx(source["targets"]["int8"]["nll"], abs=0.01)
    assert wide["drafts"]["quantspec"]["acceptance"] == pytest.approx(
        source["drafts"]["quantspec"]["acceptance"], abs=0.02
    )


def test_computed_tensors_are_left_out(widen: ModuleType, strange: Path, tmp_path: Path) -> None:
    config, tensors = llama_numpy.load(strange)
    stored = dict(tensors) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}
    source = write(tmp_path / "stored", {**config, "head_dim": 8}, stored)
    out = tmp_path / "wide"
    assert widen.main([str(source), str(out), "--times", "2", "--layers", "2"]) == 0
    _, found = llama_numpy.load(out)
    assert found.keys() == tensors.keys()


@pytest.mark.parametrize("layers", [2, 5])
def test_added_layers_have_the_type_of_what_they_copy(
    widen: ModuleType, strange: Path, tmp_path: Path, layers: int
) -> None:
    types = ["full_attention", "sliding_attention"]
    change("config.json", lambda config: config.update(layer_types=types))(strange)
    out = tmp_path / "wide"
    assert widen.main([str(strange), str(out), "--times", "2", "--layers", str(layers)]) == 0
    assert json.loads((out / "config.json").read_text())["layer_types"] == [*types, *types, types[0]][:layers]


@pytest.mark.parametrize(
    ("settings", "layers", "first"),
    [
        ({"max_window_layers": 2}, 2, 2),
        ({"max_window_layers": 2}, 3, 3),
        ({"max_window_layers": 28}, 3, 28),
        ({"max_window_layers": 28}, 29, 29),
        # A source with windows keeps them.
        ({"max_window_layers": 1}, 3, 1),
        ({"max_window_layers": 0}, 3, 0),
        # 28 if it is absent.
        ({}, 29, 29),
        ({"max_window_layers": None}, 29, 29),
        ({"use_sliding_window": False}, 29, None),
    ],
)
def test_added_layers_have_no_window_if_none_had(
    widen: ModuleType, strange: Path, tmp_path: Path, settings: dict[str, Any], layers: int, first: int | None
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 32, **settings}
    change("config.json", lambda config: config.update(window))(strange)
    out = tmp_path / "wide"
    assert widen.main([str(strange), str(out), "--times", "2", "--layers", str(layers)]) == 0
    assert json.loads((out / "config.json").read_text()).get("max_window_layers") == first


@pytest.mark.parametrize("times", [2, 4, 1024])
def test_only_the_smallest_f16_are_rounded(widen: ModuleType, times: int) -> None:
    patterns = np.arange(0x7C00, dtype=np.uint16)
    values = patterns.view(np.float16).astype(np.float32)
    found = np.frombuffer(widen.encode(values / np.float32(times), "F16"), "<f2").astype(np.float64)
    errors = np.abs(found - values.astype(np.float64) / times)
    assert not errors[values >= times * 2.0**-14].any()
    assert errors.max() == 2.0**-25
    # BF16 has the exponents of F32: it rounds below K * 2^-126, where no weights are.
    patterns = np.arange(0x0800, 0x7F80, dtype=np.uint16)
    values = (patterns.astype(np.uint32) << 16).view(np.float32)
    found = np.frombuffer(widen.encode(values / np.float32(times), "BF16"), "<u2")
    np.testing.assert_array_equal((found.astype(np.uint32) << 16).view(np.float32), values / np.float32(times))


def test_a_bias_belongs_to_every_layer(
    widen: ModuleType, strange: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, tensors = llama_numpy.load(strange)
    missing = "model.layers.1.self_attn.q_proj.bias"
    source = write(tmp_path / "uneven", config, {name: tensors[name] for name in tensors if name != missing})
    assert f"no tensor {missing}" in refused(widen, capfd, source, tmp_path / "wide", "--times", "2", "--layers", "2")


def refused(widen: ModuleType, capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert widen.main([str(argument) for argument in arguments]) == 1
    captured = capfd.readouterr()
    first, second = captured.err.splitlines()
    assert captured.out == ""
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    return captured.err


def test_a_folder_with_files_is_left_alone(
    widen: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    assert "not an empty folder" in refused(widen, capfd, hub.demo(), tmp_path, "--times", "2", "--layers", "6")
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]
    file = tmp_path / "keep.txt"
    assert "not an empty folder" in refused(widen, capfd, hub.demo(), file, "--times", "2", "--layers", "6")


def test_space_is_checked_before_anything_is_written(
    widen: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 10**8, 10**8))
    text = refused(widen, capfd, hub.demo(), tmp_path / "new" / "wide", "--times", "8", "--layers", "6")
    # 8² times the 4.8 million weights of the layers in BF16, and two tables.
    assert "needs 0.7" in text
    assert "0.10 GB are free" in text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("times", "layers", "message"),
    [
        ("0", "6", "--times is 0"),
        ("-1", "6", "--times is -1"),
        ("0", "6", "powers of two keep BF16 and F32 exact, F16's smallest weights are rounded"),
        ("2", "5", "--layers is 5"),
        # The demo's 256 channels and 2 heads, up to the engine's limits.
        ("257", "6", "--times is 257, which makes hidden_size 65792 of at most 65536\nhint: use 1 to 256;"),
        ("2", "1025", "--layers is 1025 and the source has 6\nhint: use 6 to 1024:"),
        # Refused before a plan of this many tensors is made.
        ("99999999", "6", "--times is 99999999"),
        ("2", "99999999", "--layers is 99999999"),
    ],
)
def test_shapes_that_cannot_be(
    widen: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], times: str, layers: str, message: str
) -> None:
    out = tmp_path / "wide"
    assert message in refused(widen, capfd, hub.demo(), out, "--times", times, "--layers", layers)
    assert not out.exists()


def test_every_size_stays_within_what_the_engine_loads(
    widen: ModuleType, strange: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = {**widen.SIZES_MAX, "num_hidden_layers": widen.LAYERS_MAX}
    assert limits.keys() == {*widen.WIDENED, "num_hidden_layers"}
    for key, most in limits.items():
        # The engine refuses one above the limit, and accepts the limit.
        beyond = copy_demo(tmp_path / f"{key}-beyond", **{key: most + 1})
        with pytest.raises(_native.NativeError, match=f"{key} is {most + 1}, not a whole number from 1 to {most}"):
            _native.model_info(str(beyond))
        with pytest.raises(_native.NativeError) as caught:
            _native.model_info(str(copy_demo(tmp_path / f"{key}-most", **{key: most})))
        assert "not a whole number" not in str(caught.value)
    for key, most in widen.SIZES_MAX.items():
        size = json.loads((strange / "config.json").read_text())[key]
        change("config.json", lambda config, key=key, most=most: config.update({key: most + 1}))(strange)
        text = refused(widen, capfd, strange, tmp_path / "wide", "--times", "1", "--layers", "2")
        assert f"{key} {most + 1}, more than the {most}" in text
        change("config.json", lambda config, key=key, most=most: config.update({key: most // 2 + 1}))(strange)
        text = refused(widen, capfd, strange, tmp_path / "wide", "--times", "2", "--layers", "2")
        assert "use 1 to 1;" in text
        change("config.json", lambda config, key=key, size=size: config.update({key: size}))(strange)
    assert not (tmp_path / "wide").exists()


def test_arguments_without_documents(widen: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((hub.demo() / "config.json").read_text())
    (broken / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    for source in (tmp_path / "absent", broken):
        assert "cannot read" in refused(widen, capfd, source, tmp_path / "wide", "--times", "2", "--layers", "6")


Damage = Callable[[Path], object]


def change(name: str, edit: Callable[[Any], object]) -> Damage:
    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        edit(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def change_header(edit: Callable[[Any], object]) -> Damage:
    def apply(folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


LAYER = "model.layers.1."
EMPTY = {"dtype": "BF16", "shape": [0, 0], "data_offsets": [0, 0]}


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "does not fit into the file"),
        (lambda folder: (folder / "config.json").write_text("[]"), "names nothing"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no such file"),
        (change("config.json", lambda config: config.pop("hidden_size")), "hidden_size None"),
        (change("config.json", lambda config: config.update(num_attention_heads="8")), "num_attention_heads '8'"),
        (change("config.json", lambda config: config.update(num_hidden_layers=7)), "no layer 6 of 7"),
        (change("config.json", lambda config: config.update(hidden_size=True)), "hidden_size True"),
        (change("config.json", lambda config: config.update(head_dim=False)), "head_dim False"),
        (change("config.json", lambda config: config.pop("vocab_size")), "vocab_size None"),
        (change("config.json", lambda config: config.update(num_key_value_heads=3)), "3 KV heads for 2 heads"),
        (
            change(
                "config.json",
                lambda config: (
                    config.pop("head_dim"),
                    config.update(num_attention_heads=3, num_key_value_heads=3),
                ),
            ),
            "3 heads for 256 channels",
        ),
        (change("config.json", lambda config: config.update(vocab_size=8191)), "makes it [8191, 256]"),
        (
            change("config.json", lambda config: config.update(layer_types=["full_attention"])),
            "has 1 layer_types for 6 layers",
        ),
        (
            change("config.json", lambda config: config.update(layer_types="global")),
            "layer_types 'global' for 6 layers",
        ),
        (
            change("config.json", lambda config: config.update(num_hidden_layers=5)),
            "layers.5.input_layernorm.weight is",
        ),
        (change_header(lambda header: header.pop(LAYER + "self_attn.o_proj.weight")), "no tensor " + LAYER),
        (change_header(lambda header: header.pop(LAYER + "mlp.down_proj.weight")), "no tensor " + LAYER),
        (
            change_header(lambda header: header[LAYER + "self_attn.q_proj.weight"].update(shape=[65536])),
            "q_proj.weight is [65536], config.json makes it [256, 256]",
        ),
        (change_header(lambda header: header["model.norm.weight"].update(shape=[256.0])), "does not fit"),
        (change_header(lambda header: header.update({LAYER + "extra": EMPTY})), "layers.1.extra is no part"),
        (change_header(lambda header: header.update(extra=EMPTY)), "extra is no part"),
        (change_header(lambda header: header.pop("model.norm.weight")), "no tensor model.norm.weight"),
        (change_header(lambda header: header["model.norm.weight"].update(dtype="I8")), "is I8"),
        (change_header(lambda header: header["model.norm.weight"].update(dtype=["F32"])), "is ['F32']"),
        (
            change("config.json", lambda config: (config.update(model_type=["llama"]), config.update(head_dim=None))),
            "model_type ['llama']",
        ),
        (change_header(lambda header: header["model.norm.weight"].update(shape=[255])), "does not fit"),
        (change_header(lambda header: header["model.norm.weight"].pop("shape")), "does not fit"),
        (change_header(lambda header: header.update({"model.norm.weight": 3})), "is None"),
        (change_header(lambda header: header.clear()), "names nothing"),
        (lambda source: (source / "config.json").write_text("[" * 100_000), "recursion"),
        (lambda source: (source / "tokenizer.json").unlink(), "no tokenizer.json"),
    ],
)
def test_a_damaged_source_is_one_error(
    widen: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Damage, message: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(hub.demo(), source)
    damage(source)
    assert message in refused(widen, capfd, source, tmp_path / "wide", "--times", "2", "--layers", "7")
    assert not (tmp_path / "wide").exists()


def test_the_current_folder_has_a_name(
    widen: ModuleType, strange: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(strange)
    assert widen.main([".", str(tmp_path / "wide"), "--times", "2", "--layers", "2"]) == 0
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["widened"]["source"] == "strange"
    assert (tmp_path / "wide" / "README.md").read_text().startswith("# strange ")


@pytest.mark.parametrize("existing", [False, True])
def test_a_conversion_that_fails_leaves_nothing(
    widen: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    existing: bool,
) -> None:
    out = tmp_path / "wide"
    if existing:
        out.mkdir()

    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(widen, "encode", full)
    assert "no space left" in refused(widen, capfd, hub.demo(), out, "--times", "2", "--layers", "6")
    assert out.exists() == existing
    assert not existing or not list(out.iterdir())


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the signal handlers afterwards."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(
    widen: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    def ended(*_: object) -> bytes:
        os.kill(os.getpid(), number)
        return b""

    monkeypatch.setattr(widen, "encode", ended)
    # If the script ignored the signal, this handler keeps the signal from ending all tests.
    signal.signal(number, lambda *_: None)
    command = [str(hub.demo()), str(tmp_path / "wide"), "--times", "2", "--layers", "6"]
    assert widen.main(command) == 128 + number
    assert capfd.readouterr().err == "error: interrupted\nhint: run the command again\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_is_ignored_stays_so(
    widen: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strange: Path
) -> None:
    def hung_up(values: Any, dtype: str, encode: Callable[[Any, str], bytes] = widen.encode) -> bytes:
        os.kill(os.getpid(), signal.SIGHUP)
        return encode(values, dtype)

    monkeypatch.setattr(widen, "encode", hung_up)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    (strange / "chat_template.jinja").write_text("{{ messages }}")
    assert widen.main([str(strange), str(tmp_path / "wide"), "--times", "2", "--layers", "2"]) == 0
    # Every file of the tokenizer is copied.
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "wide" / name).read_bytes() == (strange / name).read_bytes()


def test_flags_that_are_wrong_are_one_error(widen: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["a", "b", "--times", "x", "--layers", "2"]):
        with pytest.raises(SystemExit) as exit:
            widen.main(arguments)
        first, second = capfd.readouterr().err.splitlines()
        assert exit.value.code == 2
        assert first.startswith("error: ")
        assert second.startswith("hint: ")
