"""Zip archives and their XML, read as untrusted input: sizes are bounded, entities refused, nothing is fetched."""

from __future__ import annotations

import io
import posixpath
import zipfile
import zlib
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.parsers import expat

from ..errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_AGAIN = "open it in its program and save it again"
_OFFICE_DOCUMENT = "/officeDocument"
# Other document formats, recognised by a member's name or by the member `mimetype`.
_KINDS = {
    "xl/workbook.xml": "an Excel workbook",
    "ppt/presentation.xml": "a PowerPoint presentation",
    "application/vnd.oasis.opendocument.text": "an OpenDocument text",
    "application/vnd.oasis.opendocument.spreadsheet": "an OpenDocument spreadsheet",
    "application/vnd.oasis.opendocument.presentation": "an OpenDocument presentation",
}


class Archive:
    """Members of a zip archive.

    Attributes:
        name: the document's name, for errors.
    """

    def __init__(self, name: str, raw: bytes, limit: int) -> None:
        """`limit` bounds the bytes of all reads together."""
        self.name = name
        self._left = limit
        self._limit = limit
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(raw))
        except zipfile.BadZipFile as error:
            raise InputError(
                f"{name} is a damaged zip archive: {str(error).lower()}", "copy or download it again"
            ) from error
        self._members = {member.filename: member for member in self._zip.infolist()}

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def read(self, member: str) -> bytes:
        """A whole member; refuses encrypted or damaged members, and more unpacked bytes than the limit."""
        try:
            info = self._members[member]
        except KeyError as error:
            raise InputError(f"{self.name} is damaged: it lacks {member}", _AGAIN) from error
        if info.flag_bits & 1:
            raise InputError(f"{self.name} is an encrypted zip archive", "save a copy without its password")
        if info.file_size > self._left:
            raise self._too_large()
        whole = bytearray()
        try:
            with self._zip.open(info) as file:
                # The declared size may be wrong, so the actual size counts.
                while chunk := file.read(1 << 20):
                    whole += chunk
                    if len(whole) > self._left:
                        raise self._too_large()
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
            raise InputError(f"{self.name} is damaged at {member}: {error}", "copy or download it again") from error
        self._left -= len(whole)
        return bytes(whole)

    def _too_large(self) -> InputError:
        return InputError(
            f"{self.name} unpacks to more than {self._limit} bytes, more than any context holds", "split the document"
        )

    def is_docx(self) -> bool:
        """True if the archive is a Word document."""
        return self.main_part() in self._members and not any(member in _KINDS for member in self._members)

    def main_part(self) -> str:
        """Path of a Word document's body."""
        return next((path for path, what in self.relations("").values() if what.endswith(_OFFICE_DOCUMENT)), "")

    def is_epub(self) -> bool:
        """True if the archive is an e-book."""
        return self._mimetype() == "application/epub+zip" or "META-INF/container.xml" in self._members

    def describe(self) -> str:
        """Describes an archive that is neither DOCX nor EPUB."""
        names = [*self._members, self._mimetype()]
        return next((_KINDS[name] for name in names if name in _KINDS), "a zip archive")

    def _mimetype(self) -> str:
        if "mimetype" not in self._members or self._members["mimetype"].file_size > 1000:
            return ""
        return self.read("mimetype").decode("ascii", "replace").strip()

    def relations(self, part: str) -> dict[str, tuple[str, str]]:
        """The parts that a part of an Office document refers to: path and type, by id."""
        folder, base = posixpath.split(part)
        member = posixpath.join(folder, "_rels", f"{base}.rels")
        found: dict[str, tuple[str, str]] = {}

        def start(tag: str, values: Mapping[str, str]) -> None:
            if local(tag) == "Relationship" and values.get("TargetMode") != "External":
                path = resolve(folder, values.get("Target", ""))
                found[values.get("Id", "")] = (path, values.get("Type", ""))

        if member in self._members:
            self.parse(member, start)
        return found

    def parse(
        self,
        member: str,
        start: Callable[[str, Mapping[str, str]], object],
        end: Callable[[str], object] | None = None,
        text: Callable[[str], object] | None = None,
    ) -> None:
        """Parses an XML member; tags are "namespace name". Depth uses no stack, since no tree is built."""
        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartElementHandler = start
        if end is not None:
            parser.EndElementHandler = end
        if text is not None:
            parser.CharacterDataHandler = text

        def refuse(*_: object) -> None:
            raise InputError(f"{self.name} defines XML entities in {member}", "save it again in a word processor")

        # Entities are refused, as they can expand or read files; expat does not fetch external DTDs.
        parser.EntityDeclHandler = refuse
        try:
            parser.Parse(self.read(member), True)
        except expat.ExpatError as error:
            raise InputError(f"{self.name} is damaged at {member}: {error}", _AGAIN) from error


def local(tag: str) -> str:
    """A tag without its namespace."""
    return tag.rpartition(" ")[2]


def resolve(folder: str, target: str) -> str:
    """The member that a reference in a part of `folder` points to."""
    path = unquote(target.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")
