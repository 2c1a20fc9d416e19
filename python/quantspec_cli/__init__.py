"""Lossless self-speculative decoding of long documents.

    from quantspec_cli import Engine

    engine = Engine.load("path/or/hub-id")
    for piece in engine.stream("It was a dark and stormy night", max_new_tokens=100):
        print(piece, end="")

Importing the package loads neither the native module nor a tokenizer; both load on first use.
"""

from __future__ import annotations

# Type checkers treat this name as true. Importing `typing` would take longer than all other imports here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .engine import Engine
    from .errors import QuantspecError
    from .generation import Generation, Stream

__version__ = "0.1.0"

__all__ = ["Engine", "Generation", "QuantspecError", "Stream", "__version__"]

_HOME = {"Engine": "engine", "Generation": "generation", "Stream": "generation", "QuantspecError": "errors"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
