"""Hash of what an answer depends on: equal fingerprints and equal documents give equal answers of the same kernels."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__, files, gguf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model import Model
    from .options import EngineOptions, GenerateOptions

# Files of a checkpoint that affect an answer.
_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.gguf")

# Weights are sampled: reading 16 GB would take longer than many batches. Files that differ only between the samples, with
# equal size and header, count as equal.
_WHOLE_BYTES = 64 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10


def of_model(model: Model) -> str:
    """A checkpoint's identity: its small files whole, its weights by size and 256 samples of 64 KiB."""
    place = model.directory
    if files.is_file(place):
        found = [Path(part) for part in gguf.parts(str(place))]
    else:
        found = sorted({path for pattern in _PATTERNS for path in place.glob(pattern)})
    digest = hashlib.sha256()
    for path in found:
        digest.update(f"{path.name}\0{_of_file(path)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def of_speed(model: str, engine: EngineOptions) -> str:
    """Hash of what the speed on one device depends on. `model` is the result of `of_model`."""
    return _digest({"model": model, **vars(engine)})


def of_answer(model: str, engine: EngineOptions, options: GenerateOptions, **request: Any) -> str:
    """Hash of what an answer depends on besides the document. `model` is the result of `of_model`.

    Threads, method, γ and settings of drafts change no token; those other than threads do with acceptance by rejection, and
    are then included. The device never is, so that a run can be continued on another one, although other kernels may choose
    another token.
    """
    fields: dict[str, Any] = {
        "quantspec": __version__,
        "model": model,
        "weights": engine.weights,
        "kv_target": engine.kv_target,
        "kv_rounding": engine.kv_rounding,
        # A default length gives the answers of the same -n, except those that it shortens.
        **{name: value for name, value in vars(options).items() if name != "shortens"},
        **request,
    }
    if options.temperature > 0 and engine.accept == "rejection":
        fields |= {
            name: getattr(engine, name) for name in ("accept", "method", "gamma", "draft_weights", "draft_precision")
        }
        if engine.draft_model is not None:
            fields |= {"draft_model": engine.draft_model, "draft_model_kv": engine.view_of_draft_model}
        fields |= {"draft_pages": engine.pages_of_draft, "page_choice": engine.choice_of_pages}
        fields |= {"draft_refresh": engine.draft_refresh}
    return _digest(fields)


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _of_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{size}\0".encode())
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
            else:
                for sample in range(_SAMPLES):
                    file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise files.unreadable(path, error) from error
    return digest.hexdigest()
