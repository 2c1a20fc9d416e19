"""`quantspec doctor`: what this machine offers, and why a feature is unavailable."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from . import __version__, cache, hub, render, settings, sizes
from .errors import FileError, QuantspecError, native_errors, one_line
from .output import Done, Stdout

if TYPE_CHECKING:
    from collections.abc import Sequence


def doctor(*, as_json: bool) -> Done:
    """Prints the report; the caller prints that of `--json`."""
    stdout = Stdout()
    found = examine()
    if as_json:
        return Done(document=found)
    stdout.write("\n".join(lines(found)) + "\n")
    return Done()


def examine() -> dict[str, Any]:
    """The document of `--json`."""
    from . import _native

    with native_errors():
        machine = _native.doctor()
    return {
        "quantspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **machine,
        "model_cache": str(hub.cache()),
        "draft_cache": _draft_cache(),
        "packages": _versions(),
        "sizes": _sizes(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report for people."""
    cpu, gpu = found["cpu"], found["gpu"]
    report = [
        f"quantspec   {found['quantspec']}, Python {found['python']}, {found['platform']}",
        f"processor   {cpu['name']}, {render.count(cpu['threads'], 'thread')}, "
        f"reads {render.number(cpu['read_gb_per_s'])} GB/s",
        f"SIMD        {cpu['simd_reason']}",
        f"memory      {render.size(found['memory_bytes'])}",
    ]
    if gpu["available"]:
        report += [f"GPU         cuda:{index}: {_device(device)}" for index, device in enumerate(gpu["devices"])]
    else:
        report.append(f"GPU         off: {gpu['reason']}")
    report += [
        f"kernels     {_kernels(found['kernels'])}",
        f"model cache {one_line(found['model_cache'])}",
        f"draft cache {_drafts(found['draft_cache'])}",
        "packages    " + ", ".join(f"{name} {version}" for name, version in found["packages"].items()),
    ]
    return [*report, "", *sizes.lines(found["sizes"])] if found["sizes"] else report


def _sizes() -> list[dict[str, Any]]:
    """Model sizes that fit the device of `auto`; empty if it cannot be opened (`gpu` has the reason), or without a
    temporary folder.
    """
    with suppress(QuantspecError):
        return sizes.table("auto")
    return []


def _kernels(images: Sequence[str]) -> str:
    """Images ("attend sm_90a", "attend ptx compute_80") grouped by architecture; usually all contain the same modules."""
    if not images:
        return "none in this build"
    modules: dict[str, list[str]] = {}
    for image in images:
        module, _, architecture = image.partition(" ")
        modules.setdefault(architecture, []).append(module)
    groups: dict[str, list[str]] = {}
    for architecture in sorted(modules, key=lambda name: (name.startswith("ptx"), len(name.rstrip("abcdef")), name)):
        groups.setdefault(", ".join(sorted(modules[architecture])), []).append(architecture)
    return "; ".join(f"{names} for {', '.join(architectures)}" for names, architectures in groups.items())


def _device(device: dict[str, Any]) -> str:
    memory = render.size(device["memory_bytes"])
    usable = "" if device["usable"] else "; not usable, there are no kernels for it"
    return f"{device['name']}, compute capability {device['compute_capability']}, {memory}{usable}"


def _draft_cache() -> dict[str, Any] | None:
    """Folder and contents of the draft-weight cache; None if the cache is off. Of an unreadable folder, the reason."""
    folder = settings.draft_cache()
    if folder is None:
        return None
    try:
        found = cache.listing(folder)
    except FileError as error:
        return {"path": str(folder), "files": 0, "bytes": 0, "reason": error.message}
    return {"path": str(folder), "files": len(found["files"]), "bytes": found["bytes"]}


def _drafts(kept: dict[str, Any] | None) -> str:
    if kept is None:
        said = os.environ.get("QUANTSPEC_DRAFT_CACHE") == "off"
        return "off: " + ("QUANTSPEC_DRAFT_CACHE is off" if said else "no home directory is known")
    if "reason" in kept:
        return f"unusable: {kept['reason']}"
    clear = "; quantspec cache --clear removes them" * bool(kept["files"])
    return f"{one_line(kept['path'])}: {render.count(kept['files'], 'file')}, {render.size(kept['bytes'])}{clear}"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("click", "huggingface_hub", "jinja2", "rich", "tokenizers")}
