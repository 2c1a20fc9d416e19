"""EPUB: the chapters in the order of the spine, each as HTML."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ..errors import InputError
from .archive import local, resolve
from .html import decode, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .archive import Archive

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_PAGES = {"application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document", "application/xml"}


def read(archive: Archive) -> tuple[str, tuple[str, ...]]:
    """The text of a book, and warnings about missing chapters."""
    package = _package(archive)
    chapters = _spine(archive, package)
    protected = _encrypted(archive)
    texts: list[str] = []
    missing: list[str] = []
    for chapter in chapters:
        if chapter in protected:
            raise InputError(
                f"{archive.name} is an encrypted book (digital rights management)", "give a copy without protection"
            )
        if chapter in archive:
            texts.append(text_of(decode(f"{archive.name}: {chapter}", archive.read(chapter))))
        else:
            missing.append(chapter)
    if missing and not any(texts):
        raise InputError(f"{archive.name} is damaged: it lacks {missing[0]}", "copy or download it again")
    warnings = (f"{len(missing)} of {len(chapters)} chapters are missing, first {missing[0]}",) if missing else ()
    return "\n\n".join(filter(None, texts)), warnings


def _package(archive: Archive) -> str:
    """Where the list of chapters is."""
    found: list[str] = []

    def start(tag: str, values: Mapping[str, str]) -> None:
        if local(tag) == "rootfile" and "full-path" in values:
            found.append(resolve("", values["full-path"]))

    archive.parse(_CONTAINER, start)
    if not found:
        raise InputError(f"{archive.name} is damaged: {_CONTAINER} names no package", "copy or download it again")
    return found[0]


def _spine(archive: Archive, package: str) -> list[str]:
    """The chapters' members, in reading order."""
    pages: dict[str, str] = {}
    others: set[str] = set()
    spine: list[str] = []

    def start(tag: str, values: Mapping[str, str]) -> None:
        if local(tag) == "item":
            if values.get("media-type", "").lower() in _PAGES:
                pages[values.get("id", "")] = resolve(posixpath.dirname(package), values.get("href", ""))
            else:  # a picture may be a chapter
                others.add(values.get("id", ""))
        elif local(tag) == "itemref":
            spine.append(values.get("idref", ""))

    archive.parse(package, start)
    return [pages.get(name, name) for name in spine if name not in others]


def _encrypted(archive: Archive) -> set[str]:
    """Encrypted members; fonts may be encrypted, as they are not read."""
    found: set[str] = set()

    def start(tag: str, values: Mapping[str, str]) -> None:
        if local(tag) == "CipherReference":
            found.add(resolve("", values.get("URI", "")))

    if _ENCRYPTION in archive:
        archive.parse(_ENCRYPTION, start)
    return found
