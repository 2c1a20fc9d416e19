"""tools/convert.py: PyTorch checkpoints become safetensors with the same bytes, and no code in them runs."""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import Outcome, copy_demo, damaged, tool

Header = dict[str, Any]


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    return tool("convert")


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names under which PyTorch pickles a tensor."""
    torch, utils = ModuleType("torch"), ModuleType("torch._utils")
    for name in ("FloatStorage", "HalfStorage", "BFloat16Storage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        function = lambda *_: None  # noqa: E731
        function.__module__, function.__qualname__, function.__name__ = "torch._utils", name, name
        setattr(utils, name, function)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)


class Stored:
    """A storage, which a pickle identifies by its key."""

    def __init__(self, kind: str, key: str, items: int) -> None:
        self.pid = ("storage", getattr(sys.modules["torch"], kind), key, "cpu", items)


class Tensor:
    """Pickles as a tensor does."""

    def __init__(
        self,
        stored: Stored,
        shape: tuple[int, ...],
        begin: int = 0,
        stride: tuple[int, ...] | None = None,
        parameter: bool = False,
    ) -> None:
        whole = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        self.arguments = (stored, begin, shape, whole if stride is None else stride, False, OrderedDict())
        self.parameter = parameter

    def __reduce__(self) -> Any:
        utils: Any = sys.modules["torch._utils"]
        if self.parameter:
            return utils._rebuild_parameter, (Tensor(*self.arguments[:1], self.arguments[2]), True, OrderedDict())
        return utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Stored) else None


def save(path: Path, state: Any, storages: dict[str, bytes], *, order: str = "little") -> None:
    """As torch.save does."""
    raw = io.BytesIO()
    Pickler(raw, protocol=2).dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw.getvalue())
        archive.writestr("archive/byteorder", order)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def read(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def test_tensors_are_copied_bit_for_bit(convert: ModuleType, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    halves, floats = np.arange(24, dtype=np.float16).tobytes(), np.arange(5, dtype=np.float32).tobytes()
    shared = Stored("HalfStorage", "0", 24)
    state = OrderedDict(
        [
            ("matrix", Tensor(shared, (3, 4))),
            ("rest", Tensor(shared, (2, 1, 6), begin=12, stride=(6, 99, 1))),
            ("vector", Tensor(Stored("FloatStorage", "1", 5), (5,), parameter=True)),
        ]
    )
    save(folder / "pytorch_model.bin", state, {"0": halves, "1": floats})
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"pieces")
    (folder / "modeling.py").write_text("never")
    assert convert.main([str(folder), str(out)]) == 0
    header, body = read(out / "model.safetensors")
    assert header.pop("__metadata__") == {"format": "pt"}
    assert body == halves + floats
    assert header["matrix"] == {"dtype": "F16", "shape": [3, 4], "data_offsets": [0, 24]}
    assert header["rest"] == {"dtype": "F16", "shape": [2, 1, 6], "data_offsets": [24, 48]}
    assert header["vector"] == {"dtype": "F32", "shape": [5], "data_offsets": [48, 68]}
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json", "tokenizer.model"}


def as_bin(folder: Path, shards: int) -> tuple[Header, bytes]:
    """Replaces a model's safetensors by PyTorch files."""
    header, body = read(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [name for name in header if name != "__metadata__"]
    placed = {}
    for shard in range(shards):
        state, storages = OrderedDict(), {}
        for key, name in enumerate(names[shard::shards]):
            begin, end = header[name]["data_offsets"]
            kind, size = {"BF16": ("BFloat16Storage", 2), "F32": ("FloatStorage", 4)}[header[name]["dtype"]]
            storages[str(key)] = body[begin:end]
            state[name] = Tensor(Stored(kind, str(key), (end - begin) // size), tuple(header[name]["shape"]))
            placed[name] = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        save(folder / (placed[names[shard]] if shards > 1 else "pytorch_model.bin"), state, storages)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return header, body


@pytest.mark.parametrize("shards", [1, 3])
def test_a_converted_model_runs(convert: ModuleType, quantspec: Any, tmp_path: Path, shards: int) -> None:
    folder, out = copy_demo(tmp_path / "model"), tmp_path / "out"
    header, body = as_bin(folder, shards)
    assert convert.main([str(folder), str(out)]) == 0
    after, data = read(out / "model.safetensors")
    assert after.keys() - {"__metadata__"} == header.keys() - {"__metadata__"}
    for name in header.keys() - {"__metadata__"}:
        (a, b), (c, d) = header[name]["data_offsets"], after[name]["data_offsets"]
        assert body[a:b] == data[c:d]
    command = ("--text", "the night", "-n", "8", "--method", "ar", "--json")
    outcomes: list[Outcome] = [quantspec("run", *extra, *command) for extra in ((), ("--model", str(out)))]
    tokens = [outcome.json["results"][0]["tokens"] for outcome in outcomes]
    assert tokens[0] == tokens[1]


class Runs:
    """A pickle that would run a program."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def test_code_is_refused(convert: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    save(folder / "pytorch_model.bin", {"a": Runs()}, {})
    assert convert.main([str(folder), str(out)]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert re.match(r"error: the checkpoint asks for '\w+\.print'\nhint: it can run code", printed.err)
    assert not out.exists()


def test_unconvertible_checkpoints_are_one_error(
    convert: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stored = Stored("FloatStorage", "0", 6)
    data = {"0": bytes(24)}
    cases: list[tuple[Any, dict[str, bytes], str]] = [
        ({"a": Tensor(stored, (2, 3), stride=(1, 2))}, data, "not contiguous"),
        ({"a": Tensor(stored, (7,))}, data, "ends at element 7 of a storage of 6"),
        ({"a": Tensor(stored, (-2, 3))}, data, "shape"),
        ({"a": Tensor(stored, (6,))}, {"0": bytes(20)}, "lacks 4 bytes"),
        ({"a": Tensor(stored, (6,))}, {}, "archive/data/0"),
        ({"a": 5}, data, "'a' of "),
        ({"a\nb": 5}, data, r"'a\nb' of "),
        ({}, data, "has 0 tensors"),
        # The text of this shape would have 10^12 parts.
        ({"a": Tensor(stored, (nested(12),))}, data, "shape a tuple"),
        ({"a": Tensor(Stored("FloatStorage", nested(12), 6), (6,))}, data, "a tuple is no storage"),
        ({5: Tensor(stored, (6,))}, data, "called 5"),
        ([1], data, "no dictionary"),
    ]
    for number, (state, storages, what) in enumerate(cases):
        folder, out = tmp_path / f"in{number}", tmp_path / f"out{number}"
        folder.mkdir()
        save(folder / "pytorch_model.bin", state, storages)
        assert convert.main([str(folder), str(out)]) == 1
        error = capfd.readouterr().err.splitlines()
        assert len(error) == 2, error
        assert what in error[0]
        assert error[1].startswith("hint: ")
        assert not out.exists()


def nested(depth: int) -> Any:
    """A value of a few bytes in a pickle, whose text has 10^depth parts."""
    value: Any = 0
    for _ in range(depth):
        value = (value,) * 10
    return value


def test_an_entry_is_read_no_further_than_needed(
    convert: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tensor = Tensor(Stored("FloatStorage", "0", 1), (1,))
    save(tmp_path / "pytorch_model.bin", {"a": tensor}, {"0": bytes(4)}, order="l" * (32 << 20))
    tracemalloc.start()
    assert convert.main([str(tmp_path), str(tmp_path / "out")]) == 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "saved on a big-endian machine" in capfd.readouterr().err
    assert peak < 8 << 20


def test_big_endian_files_are_refused(convert: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(
        tmp_path / "pytorch_model.bin",
        {"a": Tensor(Stored("FloatStorage", "0", 1), (1,))},
        {"0": bytes(4)},
        order="big",
    )
    assert convert.main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "saved on a big-endian machine" in capfd.readouterr().err


def test_folders_are_checked(convert: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert convert.main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert "neither pytorch_model.bin nor" in capfd.readouterr().err
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../../x.bin"}}))
    assert convert.main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "a shard in another folder" in capfd.readouterr().err
    assert convert.main([str(tmp_path), str(tmp_path)]) == 1
    assert "not an empty folder" in capfd.readouterr().err


def test_damaged_files_end_in_one_error(convert: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save(folder / "whole", {"a": Tensor(Stored("FloatStorage", "0", 6), (2, 3))}, {"0": bytes(24)})
    whole = (folder / "whole").read_bytes()
    refused = 0
    for round, data in enumerate(damaged(whole, 400)):
        (folder / "pytorch_model.bin").write_bytes(data)
        code = convert.main([str(folder), str(tmp_path / f"out{round}")])
        error = capfd.readouterr().err
        assert code in {0, 1}
        assert error.count("\n") == 1 + code, error
        refused += code
    assert refused > 200
