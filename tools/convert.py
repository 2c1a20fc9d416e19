"""Converts a PyTorch checkpoint (pytorch_model.bin, or shards) to safetensors, without PyTorch and without running its code.

    python tools/convert.py Llama-2-7B-32K-Instruct converted

A .bin file is a pickle in a zip archive, and a pickle can run any program. This script unpickles with an allow list of
names that only describe tensors, and refuses everything else. Tensors are copied byte by byte, one at a time, so memory
does not grow with the model. The other files of the folder (configuration, tokenizer, templates) are copied.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import shutil
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import Parser, Refusal, check_new, check_space, reason, run

# Storage classes, by name: type in safetensors, bytes of an element.
STORAGES = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
}
ONE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
OUT = "model.safetensors"
# Other files to copy; never code.
SUFFIXES = {".json", ".jinja", ".model", ".txt"}
# Content of an archive's entry "byteorder".
LITTLE = b"little"
# Tensors are copied in pieces of this size.
PIECE_BYTES = 16 << 20
# The pickle of a 70B model's shard has some hundred kB.
PICKLE_BYTES_MAX = 64 << 20
NO_CODE = "it can run code, which this script does not; get the safetensors files of this model"


@dataclass(frozen=True)
class Storage:
    """An array in the archive."""

    key: str
    dtype: str
    item_bytes: int
    items: int


@dataclass(frozen=True)
class Tensor:
    """A contiguous part of a storage; `begin` counts elements."""

    archive: Path
    storage: Storage
    begin: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.storage.item_bytes


def shown(value: object) -> str:
    """A value of a pickle for a message, without nested values: the text of a small pickle may have any length."""
    parts = value if isinstance(value, tuple) else (value,)
    return f"{value!r:.60}" if all(type(part) in {int, str} for part in parts) else f"a {type(value).__name__}"


def rebuild(storage: Any, begin: Any, shape: Any, stride: Any, *_: Any) -> tuple[Any, ...]:
    """Arguments of `torch._utils._rebuild_tensor_v2`; checked in `tensor`."""
    return storage, begin, shape, stride


class Unpickler(pickle.Unpickler):
    """Resolves the names that describe tensors, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        match (module, name):
            case ("collections", "OrderedDict"):
                return OrderedDict
            case ("torch._utils", "_rebuild_tensor_v2"):
                return rebuild
            case ("torch._utils", "_rebuild_parameter"):
                return lambda tensor, *_: tensor
            case _:
                raise Refusal(f"the checkpoint asks for {shown(f'{module}.{name}')}", NO_CODE)

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _, items = pid
        known = any(storage is one for one in STORAGES.values())
        if kind != "storage" or not known or not isinstance(key, str) or type(items) is not int or items < 0:
            raise ValueError(f"{shown(pid)} is no storage")
        dtype, item_bytes = storage
        return Storage(key, dtype, item_bytes, items)


def tensor(path: Path, name: object, value: object) -> Tensor:
    """An entry of the state dict."""
    if not isinstance(name, str):
        raise Refusal(
            f"{path} has an entry called {shown(name)}", "convert a model's weights, not an optimiser's state"
        )
    if not isinstance(value, tuple) or len(value) != 4 or not isinstance(value[0], Storage):
        raise Refusal(f"{shown(name)} of {path} is not a tensor", "convert a model's weights, not an optimiser's state")
    storage, begin, shape, stride = value
    numbers = (begin, *shape, *stride)
    if len(shape) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{shown(name)} has the shape {shown(shape)} and the stride {shown(stride)}")
    # Strides of dimensions with one element are meaningless.
    step = 1
    for length, along in zip(reversed(shape), reversed(stride), strict=True):
        if length != 1 and along != step:
            raise Refusal(f"{shown(name)} of {path} is not contiguous", "save it again: tensor.contiguous()")
        step *= length
    if begin + math.prod(shape) > storage.items:
        raise ValueError(f"{shown(name)} ends at element {begin + math.prod(shape)} of a storage of {storage.items}")
    return Tensor(path, storage, begin, tuple(shape))


def opened(path: Path) -> zipfile.ZipFile:
    """An archive of torch.save."""
    hint = "fetch the file again; files of PyTorch before 1.6 are no archives, load and save them with a newer one"
    try:
        return zipfile.ZipFile(path)
    except OSError as error:
        raise Refusal(f"cannot read {path}: {reason(error)}", "check the folder and its permissions") from error
    except Exception as error:  # a damaged archive raises exceptions other than BadZipFile
        raise Refusal(f"{path} is not an archive of torch.save: {error}", hint) from error


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name."""
    with opened(path) as archive:
        try:
            (entry,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            order = f"{entry.filename.removesuffix('data.pkl')}byteorder"
            if order in archive.namelist():
                # A compressed entry may have any length.
                with archive.open(order) as stated:
                    if stated.read(len(LITTLE) + 1) != LITTLE:
                        raise Refusal(
                            f"{path} was saved on a big-endian machine", "save it again on a little-endian one"
                        )
            if entry.file_size > PICKLE_BYTES_MAX:
                raise ValueError(f"a pickle of {entry.file_size} bytes")
            state = Unpickler(io.BytesIO(archive.read(entry))).load()
            if not isinstance(state, dict):
                raise ValueError("no dictionary of tensors")  # noqa: TRY004 - the file is wrong, not a call
            return {name: tensor(path, name, value) for name, value in state.items()}
        except (Refusal, MemoryError):
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise Refusal(
                f"cannot read {path}: {str(error) or type(error).__name__}", "fetch the file again"
            ) from error


def found(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    if (folder / ONE).is_file():
        return tensors_of(folder / ONE)
    try:
        placed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(placed.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a shard in another folder")
    except FileNotFoundError as error:
        raise Refusal(f"{folder} has neither {ONE} nor {INDEX}", "name a folder with a PyTorch checkpoint") from error
    except OSError as error:
        raise Refusal(
            f"cannot read {folder / INDEX}: {reason(error)}", "check the folder and its permissions"
        ) from error
    except Exception as error:
        raise Refusal(f"cannot read {folder / INDEX}: {error}", "fetch the file again") from error
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= tensors_of(folder / name)
    missing = sorted(placed.keys() - tensors.keys())
    if missing:
        raise Refusal(
            f"{len(missing)} tensors are in no shard, {shown(missing[0])} among them", "fetch the shards again"
        )
    return tensors


def pieces(part: Tensor) -> Iterator[bytes]:
    """A tensor's bytes."""
    with opened(part.archive) as archive:
        (root,) = (info.filename for info in archive.infolist() if info.filename.endswith("/data.pkl"))
        try:
            with archive.open(f"{root.removesuffix('data.pkl')}data/{part.storage.key}") as data:
                data.seek(part.begin * part.storage.item_bytes)
                left = part.size
                while left:
                    piece = data.read(min(left, PIECE_BYTES))
                    if not piece:
                        raise ValueError(f"storage {shown(part.storage.key)} lacks {left} bytes")
                    yield piece
                    left -= len(piece)
        except MemoryError:
            raise
        except Exception as error:
            raise Refusal(f"cannot read {part.archive}: {error}", "fetch the file again") from error


def convert(folder: Path, out: Path) -> int:
    """Writes the checkpoint as safetensors, and returns its tensor bytes."""
    check_new(out)
    tensors = found(folder)
    if not tensors:
        raise Refusal(f"the checkpoint in {folder} has 0 tensors", "fetch its files again")
    size = sum(part.size for part in tensors.values())
    check_space(out, size)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, part in tensors.items():
        place = [offset, offset + part.size]
        header[name] = {"dtype": part.storage.dtype, "shape": list(part.shape), "data_offsets": place}
        offset += part.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{OUT}.partial"]
    try:
        with written[0].open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for part in tensors.values():
                file.writelines(pieces(part))
        for path in sorted(folder.iterdir()):
            if path.suffix in SUFFIXES and path.is_file() and not path.name.endswith(".index.json"):
                written.append(out / path.name)
                shutil.copyfile(path, written[-1])
        # Moved last, so that a folder with this file is complete.
        written[0].rename(out / OUT)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        if made:
            out.rmdir()
        raise
    return size


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        description="Convert a PyTorch checkpoint to safetensors without running code from it.",
        epilog="Example: python tools/convert.py Llama-2-7B-32K-Instruct converted",
    )
    parser.add_argument("source", type=Path, help=f"folder with {ONE} or {INDEX}")
    parser.add_argument("out", type=Path, help="new or empty folder")
    options = parser.parse_args(arguments)
    work: Callable[[], str] = lambda: f"{options.out}: {convert(options.source, options.out) / 1e9:.2f} GB"  # noqa: E731
    return run(work, options.out)


if __name__ == "__main__":
    sys.exit(main())
