"""Documents: the whole text of PDF, DOCX, HTML and EPUB is read, or the document is refused with the reason."""

from __future__ import annotations

import bz2
import contextlib
import io
import json
import re
import signal
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import docx
import pypdf
import pytest
from conftest import Outcome
from hypothesis import example, given
from hypothesis import strategies as st

from quantspec_cli import prompts
from quantspec_cli.errors import InputError

Run = Callable[..., Outcome]
Start = Callable[..., subprocess.Popen[bytes]]

# PDF ---------------------------------------------------------------------------------------------------------------


def pdf_of(objects: Sequence[bytes], root: int = 1) -> bytes:
    """A PDF file of these objects, numbered from 1, with a correct cross-reference table."""
    out = bytearray(b"%PDF-1.7\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root %d 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, root, table)
    return bytes(out)


def stream(content: bytes, head: bytes = b"") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), head, content)


def lines(*texts: str, leading: int = 14) -> bytes:
    """A content stream of lines; an empty text leaves a gap."""
    shown = b"".join(
        b"(%s) Tj T*\n" % re.sub(rb"([\\()])", rb"\\\1", text.encode("cp1252")) if text else b"T*\n" for text in texts
    )
    return b"BT /F 12 Tf %d TL 72 720 Td\n%sET" % (leading, shown)


HELVETICA = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
SCAN = b"q 612 0 0 792 0 0 cm /I Do Q"


def pdf(*contents: bytes, font: bytes = HELVETICA, more: Sequence[bytes] = (), page: bytes = b"") -> bytes:
    """A file of pages with these content streams; objects of `more` follow 4 (a picture)."""
    first = 5 + len(more)
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (kids, len(contents)),
        font,
        stream(
            b"\x80", b"/Type /XObject /Subtype /Image /Width 1 /Height 1 /BitsPerComponent 8 /ColorSpace /DeviceGray"
        ),
        *more,
    ]
    for index, content in enumerate(contents):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F 3 0 R >> /XObject << /I 4 0 R >> >> %s >>" % (first + 2 * index + 1, page)
        )
        objects.append(stream(content))
    return pdf_of(objects)


def encrypted(raw: bytes, password: str, algorithm: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(raw))
    writer.encrypt(password, owner_password="owner", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def text_of(raw: bytes, name: str = "document") -> str:
    document = prompts.from_bytes(name, raw)
    assert document == prompts.from_bytes(name, raw)
    return document.text


def refusal(raw: bytes, name: str = "document") -> InputError:
    with pytest.raises(InputError) as caught:
        prompts.from_bytes(name, raw)
    assert caught.value.message.startswith(name)
    return caught.value


def test_a_pdf_has_its_paragraphs_and_pages() -> None:
    raw = pdf(
        lines("The first line", "and the second.", "", "A paragraph (new).", "It goes on."),
        lines("Page two: caf\xe9 \u2013"),
    )
    document = prompts.from_bytes("book.pdf", raw)
    assert document.text == "The first line\nand the second.\n\nA paragraph (new).\nIt goes on.\n\nPage two: café –"
    assert document.warnings == ()


def test_a_pdf_in_double_spacing_is_one_paragraph() -> None:
    assert text_of(pdf(lines("one", "two", "three", leading=28))) == "one\ntwo\nthree"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        # As TeX, Word, a browser and reportlab write them.
        (b"/F 12 Tf (of 10) Tj /F 8 Tf 27 4.4 Td (-) Tj /F 8 Tf 3 0 Td (6) Tj /F 12 Tf 4 -4.4 Td ( m) Tj", "of 10⁻⁶ m"),
        (b"(of 10) Tj ET BT /F 8 Tf 1 0 0 1 99 704 Tm (6) Tj ET BT /F 12 Tf 1 0 0 1 104 700 Tm ( m) Tj", "of 10⁶ m"),
        (b"(10) Tj ET q 2 0 0 -2 0 0 cm BT /F 5 Tf 1 0 0 -1 43 -352 Tm (6) Tj ET Q BT /F 12 Tf", "10⁶"),
        (b"(of 10) Tj /F 8 Tf 4 Ts (6) Tj /F 12 Tf 0 Ts ( m) Tj", "of 10⁶ m"),
        (b"(at 1) Tj /F 8 Tf 20 4 Td (st) Tj", "at 1st"),
        # At a distance: in another column, a page number after a heading, and a number in several pieces.
        (b"(Section) Tj /F 8 Tf 200 4 Td (15) Tj", "Section 15"),
        (
            b"(Report) Tj ET BT /F 8 Tf 1 0 0 1 130 704 Tm (12) Tj ET BT /F 12 Tf 1 0 0 1 72 686 Tm (a) Tj",
            "Report 12\na",
        ),
        (b"(Call) Tj /F 8 Tf 40 4 Td (555) Tj 14 0 Td (-12) Tj", "Call 555-12"),
        # Not smaller, hardly higher, with a space before them, or of a line above.
        (b"(of 10) Tj /F 12 Tf 27 4.4 Td (6) Tj", "of 106"),
        (b"(of 10) Tj /F 8 Tf 27 1 Td (6) Tj", "of 106"),
        (b"(of ) Tj /F 8 Tf 19 4 Td (6) Tj", "of 6"),
        (b"(of 10) Tj /F 8 Tf 27 -4 Td (6) Tj", "of 106"),
        (b"(10) Tj /F 8 Tf 13 14 Td (6) Tj", "10\n6"),
    ],
)
def test_raised_numbers_of_a_pdf_are_superscripts(content: bytes, text: str) -> None:
    assert text_of(pdf(b"BT /F 12 Tf 72 700 Td " + content + b" ET")) == text


def pdf_in_unicode(words: str) -> bytes:
    """A page of one line; its glyphs are drawn in the order of these characters."""
    codes = {character: index for index, character in enumerate(dict.fromkeys(words), 1)}
    named = b"".join(
        b"<%04x> <%s>\n" % (code, character.encode("utf-16-be").hex().encode()) for character, code in codes.items()
    )
    cmap = (
        b"/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def 1 begincodespacerange "
        b"<0000> <ffff> endcodespacerange %d beginbfchar\n%sendbfchar endcmap end end" % (len(codes), named)
    )
    font = b"<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /Identity-H /DescendantFonts [5 0 R] /ToUnicode 6 0 R >>"
    descendant = (
        b"<< /Type /Font /Subtype /CIDFontType2 /BaseFont /X /DW 600 "
        b"/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>"
    )
    shown = b"BT /F 12 Tf 72 720 Td <%s> Tj ET" % "".join(f"{codes[c]:04x}" for c in words).encode()
    return pdf(shown, font=font, more=[descendant, stream(cmap)])


def test_non_latin_text_of_a_pdf_is_read() -> None:
    # The ligature becomes two letters; the mathematical letter, which is no ligature, is kept.
    assert text_of(pdf_in_unicode("Привет 世界 𝒳 ﬁn")) == "Привет 世界 𝒳 fin"


def test_right_to_left_text_of_a_pdf_is_read_in_its_order() -> None:
    """A PDF draws it from the left, and Arabic letters in the shape that they have in their word."""
    shapes = "\ufee3\ufeae\ufea3\ufe92\ufe8e \ufef3\ufe8e \ufefb"
    found = prompts.from_bytes("x.pdf", pdf_in_unicode(shapes[::-1]))
    assert (found.text, found.warnings) == ("مرحبا يا لا", ())
    found = prompts.from_bytes("x.pdf", pdf_in_unicode("ימים 12 שלום"[::-1]))
    assert found.warnings == ("page 1 of 1: right-to-left lines with numbers or Latin words may be out of order",)
    assert prompts.from_bytes("x.pdf", pdf_in_unicode("12 days")).warnings == ()


def test_pages_without_text_are_a_warning() -> None:
    page = lines("some words")
    document = prompts.from_bytes("x.pdf", pdf(page, page, SCAN, SCAN, page, SCAN, page))
    assert document.warnings == ("pages 3-4, 6 of 7 have no text",)
    assert prompts.from_bytes("x.pdf", pdf(page, SCAN)).warnings == ("page 2 of 2 has no text",)


def test_a_scanned_pdf_is_refused() -> None:
    error = refusal(pdf(SCAN, SCAN))
    assert "no text layer on its 2 pages" in error.message
    assert "OCR" in error.hint


def test_a_scan_with_a_stamp_is_a_warning() -> None:
    def with_picture(width: int, words: int) -> tuple[str, ...]:
        raw = pdf(lines(*["word"] * words) + SCAN)
        raw = raw.replace(b"/Width 1 /Height 1", b"/Width %d /Height 2200" % width)
        return prompts.from_bytes("x", raw).warnings

    assert with_picture(1700, 3) == ("page 1 of 1: a picture of the whole page and fewer than 25 words",)
    assert with_picture(1700, 30) == ()
    assert with_picture(100, 3) == ()


def test_pages_that_are_lost_are_a_warning() -> None:
    raw = pdf(lines("one"), lines("two")).replace(b"/Count 2", b"/Count 5")
    assert prompts.from_bytes("x", raw).warnings == ("3 of 5 pages are missing",)


def test_other_protection_than_a_password_is_named() -> None:
    protected = pdf(lines("one")).replace(
        b"/Root 1 0 R", b"/Root 1 0 R /Encrypt << /Filter /Adobe.PubSec /V 1 >> /ID [(a) (a)]"
    )
    assert "encryption" in refusal(protected).message


def test_characters_without_unicode_are_reported() -> None:
    broken = HELVETICA.replace(b"/WinAnsiEncoding", b"<< /Differences [97 /g1 /g2 /g3] >>")
    nameless = b"BT /F 12 Tf 72 720 Td (\\001\\002\\003) Tj ET"
    assert "no text layer" in refusal(pdf(nameless, font=broken)).message
    mixed = b"BT /F 12 Tf 72 720 Td (word \\001) Tj ET"
    assert prompts.from_bytes("x", pdf(mixed)).warnings == (
        "page 1 of 1: characters that the fonts do not name are U+FFFD",
    )


def test_numbers_of_glyphs_are_no_text() -> None:
    """Fonts of subsets without a table of characters: their text would be other words, or names of glyphs."""
    names = b" ".join(b"/g%d" % number for number in range(97, 123))
    numbered = HELVETICA.replace(b"/WinAnsiEncoding", b"<< /Differences [97 %s] >>" % names)
    assert "no text layer" in refusal(pdf(lines("only small"), font=numbered)).message
    mixed = prompts.from_bytes("x", pdf(lines("ABC and/or DEF"), font=numbered))
    assert mixed.text == "ABC \ufffd\ufffd\ufffd/\ufffd\ufffd DEF"
    assert mixed.warnings == ("page 1 of 1: characters that the fonts do not name are U+FFFD",)

    def glyphs(ordering: bytes, more: bytes = b"") -> bytes:
        font = b"<< /Type /Font /Subtype /Type0 /BaseFont /F /Encoding /Identity-H /DescendantFonts [5 0 R] >>"
        cid = b"<< /Type /Font /Subtype /CIDFontType2 /CIDSystemInfo << /Registry (Adobe) /Ordering (%s) >> %s >>"
        content = b"BT /F 12 Tf 72 720 Td <00480065> Tj ET"
        return pdf(content, font=font, more=[cid % (ordering, more)])

    for ordering in (b"Identity", b"Japan1"):
        assert "no text layer" in refusal(glyphs(ordering)).message
    assert text_of(glyphs(b"UCS")) == text_of(glyphs(b"Identity", b"/CIDToGIDMap 4 0 R")) == "He"


def test_attached_files_of_a_pdf_are_a_warning() -> None:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf(lines("See the attachment."))))
    for name in ("contract.pdf", "annex.pdf"):
        writer.add_attachment(name, b"x")
        out = io.BytesIO()
        writer.write(out)
    document = prompts.from_bytes("x", out.getvalue())
    assert (document.text, document.warnings) == ("See the attachment.", ("2 attached files not read",))


@pytest.mark.parametrize("algorithm", ["RC4-40", "RC4-128", "AES-128", "AES-256"])
def test_an_encrypted_pdf_is_read_or_refused(algorithm: str) -> None:
    raw = pdf(lines("a secret"))
    assert text_of(encrypted(raw, "", algorithm)) == "a secret"
    error = refusal(encrypted(raw, "password", algorithm))
    assert "encrypted" in error.message
    assert "password" in error.hint


def test_form_fields_are_read() -> None:
    field = b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /V (Jane Doe) /Rect [0 0 9 9] >>"
    kid = b"<< /Type /Annot /Subtype /Widget /Parent 7 0 R /Rect [0 0 9 9] >>"
    parent = b"<< /FT /Ch /T (state) /V (Ohio) /Kids [6 0 R] >>"
    typed = b"<< /Type /Annot /Subtype /FreeText /Contents (typed on top) /Rect [0 0 9 9] >>"
    link = b"<< /Type /Annot /Subtype /Link /Contents (a link) /Rect [0 0 9 9] >>"
    raw = pdf(lines("Name:"), more=[field, kid, parent, typed, link], page=b"/Annots [5 0 R 6 0 R 8 0 R 9 0 R]")
    assert text_of(raw) == "Name:\nJane Doe\nOhio\ntyped on top"


def test_chosen_boxes_of_a_form_are_read() -> None:
    def box(field: bytes, state: bytes) -> bytes:
        return b"<< /Type /Annot /Subtype /Widget %s /AS /%s /Rect [0 0 9 9] >>" % (field, state)

    boxes = [
        box(b"/FT /Btn /T (b1) /TU 11 0 R", b"Yes"),
        box(b"/FT /Btn /T (b2)", b"Off"),
        box(b"/Parent 9 0 R", b"Single"),
        box(b"/Parent 9 0 R", b"Off"),
        b"<< /FT /Btn /Ff 32768 /T (status) /V /Single /Kids [7 0 R 8 0 R] >>",
        box(b"/FT /Btn /Ff 65536 /T (print)", b"Yes"),
        b"(I agree)",
    ]
    raw = pdf(lines("Form"), more=boxes, page=b"/Annots [5 0 R 6 0 R 7 0 R 8 0 R 10 0 R]")
    assert text_of(raw) == "Form\n☒ I agree\n☒ status: Single"


def form_of(*objects: bytes, annotations: Sequence[int] = (), pages: int = 1) -> prompts.Document:
    """A document of pages with these annotations; `objects` are numbered from 5."""
    shown = b"/Annots [%s]" % b" ".join(b"%d 0 R" % number for number in annotations)
    return prompts.from_bytes("form.pdf", pdf(*[lines("Form")] * pages, more=objects, page=shown))


def widget(entries: bytes) -> bytes:
    return b"<< /Type /Annot /Subtype /Widget /Rect [0 0 9 9] %s >>" % entries


def test_fields_inherit_from_the_fields_above_them() -> None:
    document = form_of(
        b"<< /FT 16 0 R /T (top) /V 15 0 R /Kids [6 0 R] >>",
        b"<< /T (middle) /Parent 5 0 R /Kids [7 0 R] >>",
        widget(b"/Parent 6 0 R"),
        b"<< /T (field) /V (in the parent) /Kids [9 0 R] >>",
        widget(b"/FT /Tx /V null /Parent 8 0 R"),
        b"<< /FT /Btn /Ff 32768 /T (group) /Kids [11 0 R] >>",
        b"<< /T (status) /Parent 10 0 R /Kids [12 0 R 13 0 R] >>",
        widget(b"/Parent 11 0 R /AS /Single"),
        widget(b"/FT /Btn /TU (Married) /Parent 11 0 R /AS /1"),
        widget(b"/FT /Btn /Ff 0 /T () /Parent 11 0 R /AS /On"),
        b"(in the\\rgrandparent)",
        b"/Tx",
        annotations=[7, 9, 12, 13, 14],
    )
    assert document.text.split("\n") == [
        *("Form", "in the", "grandparent", "in the parent"),
        *("☒ status: Single", "☒ Married: 1", "☒ status"),
    ]
    assert document.warnings == ()


def test_all_choices_of_a_list_are_read() -> None:
    document = form_of(widget(b"/FT /Ch /Ff 2097152 /V [(one) 6 0 R]"), b"(three)", annotations=[5])
    assert (document.text, document.warnings) == ("Form\none, three", ())


def test_a_field_in_several_places_is_read_once() -> None:
    kid = widget(b"/Parent 5 0 R")
    agreed = widget(b"/Parent 8 0 R /AS /Yes")
    document = form_of(
        b"<< /FT /Tx /V (Jane) /Kids [6 0 R 7 0 R] >>",
        *(kid, kid),
        b"<< /FT /Btn /T (agreed) /Kids [9 0 R 10 0 R] >>",
        *(agreed, agreed),
        *(widget(b"/FT /Tx /T (a) /V (same)"), widget(b"/FT /Tx /T (b) /V (same)")),
        annotations=[6, 7, 9, 10, 11, 12],
        pages=2,
    )
    assert document.text == "Form\nJane\n☒ agreed\nsame\nsame\n\nForm"


@pytest.mark.parametrize(
    "entries",
    [
        b"/FT /Tx /V 5",
        b"/FT /Tx /V << /A (b) >>",
        b"/FT /Ch /V [(kept) 7]",
        b"/FT /Ch /V [(kept) 99 0 R]",
        b"/FT /Btn /T [5] /AS /Yes",
    ],
)
def test_fields_that_are_not_text_are_a_warning(entries: bytes) -> None:
    document = form_of(widget(entries), widget(b"/FT /Tx /V (next)"), annotations=[5, 6])
    assert document.text == ("Form\nkept\nnext" if b"kept" in entries else "Form\nnext")
    assert any("is not text" in warning for warning in document.warnings)


@pytest.mark.parametrize(
    "damaged",
    [
        b"null",
        b"[1 2]",
        widget(b"/FT /Tx /Parent 5 0 R"),
        widget(b"/FT /Tx /Parent 6 0 R"),
        widget(b"/Parent (x)"),
        widget(b"/FT [/Tx] /V (x)"),
        widget(b"/FT /Btn /Ff (x) /AS [5] /T (x)"),
        widget(b"/FT /Sig /V << >>"),
    ],
)
def test_damaged_fields_leave_the_other_text(damaged: bytes) -> None:
    """A circle of fields ends, and no error of a field loses the page."""
    circle = widget(b"/Parent 5 0 R")
    document = form_of(damaged, circle, widget(b"/FT /Tx /V (next)"), annotations=[5, 6, 99, 7])
    assert document.text == "Form\nnext"


@pytest.mark.parametrize("annotations", [b"99 0 R", b"(x)", b"<< >>"])
def test_a_damaged_list_of_fields_is_a_warning(annotations: bytes) -> None:
    document = prompts.from_bytes("form.pdf", pdf(lines("Form"), page=b"/Annots " + annotations))
    assert document.text == "Form"
    assert document.warnings[0].startswith("page 1 of 1 may be incomplete")


def test_an_error_in_a_field_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise RecursionError

    monkeypatch.setattr("quantspec_cli.documents.form.Form._text", fails)
    document = form_of(widget(b"/FT /Tx /V (lost)"), annotations=[5])
    assert document.text == "Form"
    assert "page 1 of 1 may be incomplete: a form field or note cannot be read (RecursionError)" in document.warnings


def test_fields_that_explode_are_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantspec_cli.documents.form._LENGTH_MAX", 1000)
    fields = [widget(b"/FT /Tx /V 105 0 R")] * 100
    document = form_of(*fields, b"(%s)" % (b"word " * 80), annotations=range(5, 105))
    assert document.text.count("word") == 160
    assert "more than 1000 characters" in document.warnings[0]
    # Lists of many references to one text, in many fields.
    fields = [widget(b"/FT /Ch /V 105 0 R")] * 100
    document = form_of(*fields, b"[%s]" % (b"106 0 R " * 1000), b"(word)", annotations=range(5, 105))
    assert (document.text, document.warnings) == ("Form\nword", ())


def test_a_form_for_adobe_only_is_refused() -> None:
    raw = pdf(lines("Please wait...")).replace(b"/Type /Catalog", b"/Type /Catalog /NeedsRendering true")
    assert "XFA" in refusal(raw).message


def test_messages_of_pypdf_are_warnings_and_not_printed() -> None:
    program = "import sys; from quantspec_cli import prompts; print(prompts.read('/dev/stdin').warnings)"
    raw = pdf(lines("words"), lines("more")).replace(b"/Encoding /WinAnsiEncoding", b"/Encoding /NoSuchEncodingX")
    done = subprocess.run([sys.executable, "-c", program], input=raw, capture_output=True, check=True, timeout=60)
    assert done.stderr == b""
    assert b"may be incomplete" in done.stdout


@pytest.mark.slow
def test_many_pages_are_read() -> None:
    count = 3000
    text = text_of(pdf(*(lines(f"page {number}") for number in range(count))))
    assert text.split("\n\n") == [f"page {number}" for number in range(count)]


def test_a_page_tree_that_explodes_or_loops_is_refused() -> None:
    # Ten levels of ten times the same node are ten billion pages.
    levels = [
        b"<< /Type /Pages /Parent %d 0 R /Count 10 /Kids [%s] >>"
        % (number - 1, b" ".join([b"%d 0 R" % (number + 1)] * 10))
        for number in range(2, 12)
    ]
    leaf = b"<< /Type /Page /Parent 11 0 R /MediaBox [0 0 9 9] >>"
    refusal(pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", *levels, leaf]))
    loop = b"<< /Type /Pages /Kids [2 0 R] /Count 1 >>"
    refusal(pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", loop]))
    refusal(pdf_of([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [] /Count 1000000000 >>"]))


def test_a_page_that_explodes_is_left_out_with_a_warning() -> None:
    bomb = zlib.compress(b"(x) Tj\n" * 30_000_000, 9)
    raw = pdf(lines("words"), b"").replace(
        stream(b""), b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(bomb), bomb)
    )
    document = prompts.from_bytes("x", raw)
    assert document.text == "words"
    assert [warning.partition(":")[0] for warning in document.warnings] == ["page 2 of 2 cannot be read"]


def test_deep_nesting_in_a_pdf_does_not_crash() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    refusal(pdf(deep + b" TJ"))
    refusal(pdf_of([b"<< /Type /Catalog /Pages 2 0 R /X %s >>" % deep, b"<< /Type /Pages /Kids [] /Count 0 >>"]))


def test_without_the_extra_a_pdf_names_it(
    fake: object, quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.pdf"
    path.write_bytes(pdf(lines("words")))
    monkeypatch.setitem(sys.modules, "pypdf", None)
    quantspec("run", "--prompt", str(path)).assert_error(1, "book.pdf is a PDF", "pip install 'quantspec[documents]'")


# DOCX --------------------------------------------------------------------------------------------------------------

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def saved(document: Any) -> bytes:
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def zipped(members: dict[str, bytes | str], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def relations(*pairs: tuple[str, str]) -> str:
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
    each = "".join(
        f'<Relationship Id="r{index}" Type="{office}{kind}" Target="{target}"/>'
        for index, (kind, target) in enumerate(pairs)
    )
    return f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{each}</Relationships>'


def word(body: str, head: str = "", **parts: str) -> bytes:
    """A document from its XML; `parts` are footnotes, numbering, styles and so on."""
    members: dict[str, bytes | str] = {
        "_rels/.rels": relations(("officeDocument", "word/document.xml")),
        "word/_rels/document.xml.rels": relations(*((kind, f"{kind}.xml") for kind in parts)),
        "word/document.xml": f"{head}<w:document {W}><w:body>{body}</w:body></w:document>",
    }
    return zipped(members | {f"word/{kind}.xml": content for kind, content in parts.items()})


def p(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def run(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t>{text}</w:t></w:r>"


def test_a_docx_has_paragraphs_tables_and_headings_in_order() -> None:
    document = docx.Document()
    document.add_heading("Contract", 0)
    document.add_heading("Parties", 2)
    document.add_paragraph("Before the table: Ünïcødé, 日本語.")
    table = document.add_table(2, 3)
    for index, text in enumerate(["Name", "Age", "", "Ada", "36", "x\ny"]):
        table.cell(*divmod(index, 3)).text = text
    document.add_paragraph("After\tthe table.\nA new line.")
    document.add_paragraph("apples", style="List Bullet")
    document.add_paragraph("pears", style="List Bullet")
    document.add_paragraph("first", style="List Number")
    document.add_paragraph("second", style="List Number")
    section = document.sections[0]
    section.header.paragraphs[0].text = "CONFIDENTIAL"
    section.footer.paragraphs[0].text = "the foot"
    assert text_of(saved(document)) == (
        "CONFIDENTIAL\n\n# Contract\n\n## Parties\n\nBefore the table: Ünïcødé, 日本語.\n\n"
        "Name | Age |\nAda | 36 | x y\n\nAfter\tthe table.\nA new line.\n\n"
        "- apples\n- pears\n1. first\n2. second\n\nthe foot"
    )


def test_text_that_python_docx_omits_is_read() -> None:
    run = "<w:r><w:t>%s</w:t></w:r>"
    body = (
        f"<w:p>{run % 'kept '}<w:ins>{run % 'inserted '}</w:ins><w:del><w:r><w:delText>deleted</w:delText></w:r></w:del>"
        f"<w:moveFrom>{run % 'moved away'}</w:moveFrom><w:hyperlink>{run % 'link'}</w:hyperlink>"
        '<w:r><w:footnoteReference w:id="7"/></w:r></w:p>'
        f"<w:sdt><w:sdtContent>{p('in a control')}</w:sdtContent></w:sdt>"
        '<w:p><w:r><mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">'
        f"<mc:Choice><w:txbxContent>{p('in a box')}</w:txbxContent></mc:Choice>"
        f"<mc:Fallback><w:txbxContent>{p('in a box')}</w:txbxContent></mc:Fallback></mc:AlternateContent>"
        "<w:t>around it</w:t></w:r></w:p>"
        "<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:r><w:instrText>PAGE</w:instrText><w:t>a</w:t><w:tab/><w:t>b</w:t>"
        "<w:br/><w:t>c</w:t><w:noBreakHyphen/></w:r></w:p>"
    )
    notes = f'<w:footnotes {W}><w:footnote w:type="separator" w:id="0">{p("-")}</w:footnote>'
    notes += f'<w:footnote w:id="7">{p("See page 3.")}{p("And 4.")}</w:footnote></w:footnotes>'
    assert text_of(word(body, footnotes=notes)) == (
        "kept inserted link[^1]\n\nin a control\n\nin a box\n\naround it\n\na\tb\nc\N{NON-BREAKING HYPHEN}\n\n"
        "[^1]: See page 3.\n\nAnd 4."
    )


def test_hidden_text_of_a_docx_is_left_out() -> None:
    box = f"<w:r><w:rPr><w:vanish/></w:rPr><w:txbxContent>{p('in a box')}</w:txbxContent><w:t>after it</w:t></w:r>"
    mark = "<w:pPr><w:rPr><w:vanish/></w:rPr></w:pPr>"
    body = (
        f"<w:p>{run('seen ')}{run('hidden ', '<w:vanish/>')}"
        + run("shown ", '<w:vanish w:val="0"/>')
        + f"{run('on paper', '<w:webHidden/>')}</w:p><w:p>{mark}{run('a hidden mark')}{box}</w:p>"
    )
    assert text_of(word(body)) == "seen shown on paper\n\na hidden mark"


STYLES = (
    f'<w:styles {W}><w:style w:type="paragraph" w:default="1" w:styleId="Normal"/>'
    '<w:style w:type="character" w:styleId="Hid"><w:rPr><w:vanish/></w:rPr></w:style>'
    '<w:style w:type="character" w:styleId="HidToo"><w:basedOn w:val="Hid"/></w:style>'
    '<w:style w:type="character" w:styleId="Seen"><w:basedOn w:val="Hid"/><w:rPr><w:vanish w:val="off"/></w:rPr></w:style>'
    '<w:style w:type="character" w:styleId="Circle"><w:basedOn w:val="Circle"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="HP"><w:rPr><w:vanish/></w:rPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="HPToo"><w:basedOn w:val="HP"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Was"><w:rPr><w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange></w:rPr>'
    "</w:style>"
    '<w:style w:type="table" w:styleId="T"><w:tblStylePr><w:rPr><w:vanish/></w:rPr></w:tblStylePr></w:style>'
    '<w:style w:type="table" w:styleId="HT"><w:rPr><w:vanish/></w:rPr></w:style></w:styles>'
)


def test_text_that_a_style_hides_is_left_out() -> None:
    def paragraph(style: str, *runs: str) -> str:
        return f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{"".join(runs)}</w:p>'

    def styled(text: str, style: str, more: str = "") -> str:
        return run(text, f'<w:rStyle w:val="{style}"/>{more}')

    shown = [run("a"), styled("b", "Seen"), styled("c", "Circle"), styled("d", "None")]
    shown += [styled("e", "Hid", '<w:vanish w:val="false"/>')]
    hidden = [styled("HIDDEN", "Hid"), styled("HIDDEN", "HidToo"), styled("HIDDEN", "Seen", "<w:vanish/>")]
    box = f"<w:r><w:txbxContent>{p('HIDDEN')}</w:txbxContent></w:r>"
    math = f"<m:oMath {MATH}><m:f><m:num><m:r><m:t>HIDDEN</m:t></m:r></m:num></m:f></m:oMath>"
    body = paragraph("Normal", *shown, *hidden)
    body += paragraph("HP", run("HIDDEN"), styled("HIDDEN", "Seen"), run("f", '<w:vanish w:val="0"/>'), box, math)
    hidden_part = "<m:r><w:rPr><w:vanish/></w:rPr><m:t>HIDDEN</m:t></m:r><m:r><m:t>x+y</m:t></m:r>"
    body += f"<w:p><m:oMath {MATH}>{hidden_part}</m:oMath></w:p>"
    # Two levels of styles toggle the property.
    body += paragraph("HPToo", run("HIDDEN"), styled("g", "HidToo"))
    body += paragraph("Was", run("h")) + paragraph("T", run("i"))
    body += f"<w:p><w:r><w:txbxContent>{paragraph('HP', run('HIDDEN'))}{p('in a box')}</w:txbxContent></w:r></w:p>"
    # A text box of hidden text is hidden, whatever is in it.
    unhidden = run("HIDDEN", '<w:vanish w:val="0"/>')
    body += f"<w:p>{styled(f'</w:t><w:txbxContent><w:p>{unhidden}</w:p></w:txbxContent><w:t>', 'Hid')}</w:p>"
    cells = [paragraph("HP", run("HIDDEN")), p("in a cell")]
    for style in ("T", "HT"):
        before = '<w:tblPrChange><w:tblPr><w:tblStyle w:val="None"/></w:tblPr></w:tblPrChange>'
        properties = f'<w:tblPr><w:tblStyle w:val="{style}"/>{before}</w:tblPr>'
        body += f"<w:tbl>{properties}{''.join(f'<w:tr><w:tc>{cell}</w:tc></w:tr>' for cell in cells)}</w:tbl>"
        cells = [
            paragraph("HP", run("toggled")),
            p("HIDDEN"),
            f"<w:tbl><w:tr><w:tc>{p('nested')}</w:tc></w:tr></w:tbl>",
        ]
    body += p("after it")
    header = f"<w:hdr {W}>{paragraph('HP', run('HIDDEN'))}{p('head')}</w:hdr>"
    assert text_of(word(body, styles=STYLES, header=header)).split("\n\n") == (
        ["head", "abcde", "f", "x+y", "g", "h", "i", "in a box", "in a cell", "toggled", "nested", "after it"]
    )


def test_defaults_may_hide_text() -> None:
    """Most paragraphs have no style of their own: they have the default one."""
    shown = run("shown", '<w:vanish w:val="0"/>')
    body = p("HIDDEN") + p("HIDDEN", '<w:pStyle w:val="None"/>') + f"<w:p>{shown}</w:p>"
    normal = '<w:style w:type="paragraph" w:default="1" w:styleId="N"><w:rPr><w:vanish/></w:rPr></w:style>'
    defaults = "<w:docDefaults><w:rPrDefault><w:rPr><w:vanish/></w:rPr></w:rPrDefault></w:docDefaults>"
    for styles in (normal, defaults):
        assert text_of(word(body, styles=f"<w:styles {W}>{styles}</w:styles>")) == "shown"


def test_hidden_paragraphs_are_not_counted() -> None:
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0">{level(0, "decimal", "%1.")}</w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num></w:numbering>'
    )
    at = '<w:numPr><w:numId w:val="1"/></w:numPr>'
    by_mark = f"<w:p><w:pPr>{at}<w:rPr><w:vanish/></w:rPr></w:pPr>{run('HIDDEN', '<w:vanish/>')}</w:p>"
    body = p("one", at) + by_mark + p("HIDDEN", f'<w:pStyle w:val="HP"/>{at}') + p("two", at)
    # Its mark is shown, and with it the number.
    body += f"<w:p><w:pPr>{at}</w:pPr>{run('HIDDEN', '<w:vanish/>')}</w:p>" + p("four", at)
    assert text_of(word(body, numbering=numbering, styles=STYLES)) == "1. one\n2. two\n4. four"


def test_notes_of_hidden_and_deleted_text_are_left_out() -> None:
    def note(identifier: int, properties: str = "") -> str:
        return f'<w:r><w:rPr>{properties}</w:rPr><w:footnoteReference w:id="{identifier}"/></w:r>'

    hidden = '<w:rStyle w:val="Hid"/>'
    body = f"<w:p>{run('a')}{note(2, hidden)}<w:del>{note(3)}</w:del>{note(4)}</w:p>"
    texts = {2: run("HIDDEN"), 3: run("DELETED"), 4: run("seen") + run("HIDDEN", hidden)}
    notes = "".join(f'<w:footnote w:id="{number}"><w:p>{text}</w:p></w:footnote>' for number, text in texts.items())
    document = word(body, styles=STYLES, footnotes=f"<w:footnotes {W}>{notes}</w:footnotes>")
    assert text_of(document) == "a[^1]\n\n[^1]: seen"


def test_parts_of_a_docx_that_are_not_read_are_a_warning() -> None:
    document = prompts.from_bytes("x", word(p("text"), aFChunk="<html/>", chart="<c/>"))
    assert document.text == "text"
    assert document.warnings == ("1 inserted file not read", "1 chart not read")


MATH = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'


def level(index: int, form: str, text: str, more: str = "") -> str:
    form = f'<w:start w:val="1"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/>'
    return f'<w:lvl w:ilvl="{index}">{form}</w:lvl>'


def test_clauses_have_the_numbers_that_word_shows() -> None:
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="5">'
        + level(0, "upperRoman", "Article %1", '<w:pStyle w:val="Clause"/>')
        + level(1, "decimal", "%1.%2", "<w:isLgl/>")
        + level(2, "lowerLetter", "(%3)")
        + '</w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="5"/></w:num>'
        '<w:num w:numId="2"><w:abstractNumId w:val="5"/><w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/>'
        "</w:lvlOverride></w:num></w:numbering>"
    )
    styles = (
        f'<w:styles {W}><w:style w:styleId="Clause"><w:name w:val="heading 1"/><w:pPr><w:numPr><w:numId w:val="1"/>'
        '</w:numPr></w:pPr></w:style><w:style w:styleId="Sub"><w:basedOn w:val="Clause"/></w:style></w:styles>'
    )

    def at(index: int, number: int = 1) -> str:
        return f'<w:numPr><w:ilvl w:val="{index}"/><w:numId w:val="{number}"/></w:numPr>'

    body = "".join(
        [
            p("Parties", '<w:pStyle w:val="Clause"/>'),
            p("The seller", at(1)),
            p("a shop", at(2)),
            p("a person", at(2)),
            p("The buyer", at(1)),
            p("", '<w:pStyle w:val="Clause"/>'),
            p("Price", '<w:pStyle w:val="Sub"/>'),
            p("In dollars", at(1)),
            p("Anew", at(0, 2)),
            p("No number", at(0, 0)),
        ]
    )
    assert text_of(word(body, numbering=numbering, styles=styles)) == (
        "# Article I Parties\n\n  1.1 The seller\n    (a) a shop\n    (b) a person\n  1.2 The buyer\n\n"
        "# Article III Price\n\n  3.1 In dollars\nArticle IX Anew\n\nNo number"
    )


@pytest.mark.parametrize(
    ("form", "start", "numbers"),
    [
        ("cardinalText", 1, ["One", "Two"]),
        ("cardinalText", 20, ["Twenty", "Twenty-one"]),
        ("cardinalText", 99, ["Ninety-nine", "100"]),
        ("ordinalText", 1, ["First", "Second"]),
        ("ordinalText", 8, ["Eighth", "Ninth"]),
        ("ordinalText", 20, ["Twentieth", "Twenty-first"]),
        ("ordinal", 1, ["1st", "2nd"]),
        ("ordinal", 12, ["12th", "13th"]),
        ("ordinal", 111, ["111th", "112th"]),
        ("ordinal", 22, ["22nd", "23rd"]),
    ],
)
def test_numbers_may_be_words_and_ordinals(form: str, start: int, numbers: list[str]) -> None:
    of = level(0, form, "Article %1.").replace('<w:start w:val="1"/>', f'<w:start w:val="{start}"/>')
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0">{of}</w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num></w:numbering>'
    )
    body = p("a", '<w:numPr><w:numId w:val="1"/></w:numPr>') * 2

    def with_language(properties: str) -> list[str]:
        defaults = f"<w:docDefaults><w:rPrDefault><w:rPr>{properties}</w:rPr></w:rPrDefault></w:docDefaults>"
        styles = f'<w:styles {W}>{defaults}<w:style w:styleId="a"><w:rPr><w:lang w:val="fr-FR"/></w:rPr></w:style></w:styles>'
        return text_of(word(body, numbering=numbering, styles=styles)).split("\n")

    assert text_of(word(body, numbering=numbering)).split("\n") == [f"Article {number}. a" for number in numbers]
    for properties in ("", '<w:lang w:eastAsia="ja-JP"/>', '<w:lang w:val="en-GB"/>'):
        assert with_language(properties) == [f"Article {number}. a" for number in numbers]
    # Words of another language are not known.
    assert with_language('<w:lang w:val="es-ES"/>') == [f"Article {start}. a", f"Article {start + 1}. a"]


def test_lists_that_refer_to_a_style_or_change_a_level_are_counted() -> None:
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0"><w:styleLink w:val="Legal"/>'
        + level(0, "upperRoman", "Article %1")
        + level(1, "decimal", "Section %2", '<w:lvlRestart w:val="0"/>')
        + level(2, "lowerLetter", "(%3)", '<w:lvlRestart w:val="1"/>')
        + '</w:abstractNum><w:abstractNum w:abstractNumId="1"><w:numStyleLink w:val="Legal"/></w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
        '<w:num w:numId="2"><w:abstractNumId w:val="1"/></w:num>'
        f'<w:num w:numId="3"><w:abstractNumId w:val="0"/><w:lvlOverride w:ilvl="0">{level(0, "lowerRoman", "%1)")}'
        "</w:lvlOverride></w:num></w:numbering>"
    )

    def at(index: int, number: int = 2) -> str:
        return f'<w:numPr><w:ilvl w:val="{index}"/><w:numId w:val="{number}"/></w:numPr>'

    body = "".join(
        p(text, at(index))
        for text, index in (("a", 0), ("b", 1), ("c", 2), ("d", 1), ("e", 2), ("f", 0), ("g", 1), ("h", 2))
    )
    body += p("i", at(0, 1)) + p("j", at(0, 3))
    assert text_of(word(body, numbering=numbering)) == (
        "Article I a\n  Section 1 b\n    (a) c\n  Section 2 d\n    (b) e\nArticle II f\n  Section 3 g\n    (a) h\n"
        "Article I i\nii) j"
    )


def test_breaks_that_a_tracked_change_deletes_join_paragraphs() -> None:
    numbering = (
        f'<w:numbering {W}><w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:start w:val="1"/>'
        '<w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl></w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num></w:numbering>'
    )
    at = '<w:numPr><w:numId w:val="1"/></w:numPr>'
    deleted = f"{at}<w:rPr><w:del/></w:rPr>"
    gone = f"<w:p><w:pPr>{deleted}</w:pPr><w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
    cell = f"<w:tbl><w:tr><w:tc>{p('x', deleted)}</w:tc><w:tc>{p('y')}</w:tc></w:tr></w:tbl>"
    # The break was deleted in an earlier version, and exists.
    kept = f"{at}<w:rPr><w:rPrChange><w:rPr><w:del/></w:rPr></w:rPrChange></w:rPr>"
    body = p("one", at) + gone + p("The ten", deleted) + p("ant", at) + p("three", kept) + p("end", deleted) + cell
    assert text_of(word(body + p("last", deleted), numbering=numbering)) == (
        "1. one\n2. The tenant\n3. three\n\nend\n\nx | y\n\nlast"
    )


def test_symbols_of_a_form_are_read() -> None:
    def symbol(font: str, code: str) -> str:
        return f'<w:r><w:sym w:font="{font}" w:char="{code}"/></w:r>'

    boxes = [symbol("Wingdings", code) for code in ("F0A8", "F0FE", "00FD")] + [symbol("Wingdings 2", "F052")]
    greek = "".join(symbol("Symbol", code) for code in ("F0B3", "F061", "F062", "006D", "F079", "F057", "F07A"))
    raw = word(f"<w:p>{''.join(boxes)}{greek}</w:p>")
    assert prompts.from_bytes("x", raw) == prompts.Document("x", "☐☑☒☑≥αβμψΩζ")
    formula = "".join(symbol("Symbol", code) for code in ("F044", "003D", "F02D", "F031", "002E", "0035", "F025"))
    assert text_of(word(f"<w:p>{formula}</w:p>")) == "Δ=−1.5%"
    for code in ("F061", "0061"):
        unknown = prompts.from_bytes("x", word(f"<w:p>{symbol('Webdings', code)}</w:p>"))
        assert (unknown.text, unknown.warnings) == ("\uf061", ("1 symbol not read",))
    assert text_of(word(f"<w:p>{symbol('Arial', '0061')}</w:p>")) == "a"


def test_choices_in_a_form_are_read() -> None:
    def field(data: str) -> str:
        return f'<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:name w:val="f"/>{data}</w:ffData></w:fldChar></w:r>'

    body = "".join(
        f"<w:p>{field(data)}<w:r><w:t> {text}</w:t></w:r></w:p>"
        for text, data in (
            ("on", '<w:checkBox><w:sizeAuto/><w:default w:val="0"/><w:checked/></w:checkBox>'),
            ("off", '<w:checkBox><w:default w:val="1"/><w:checked w:val="0"/></w:checkBox>'),
            ("default", '<w:checkBox><w:default w:val="1"/></w:checkBox>'),
            (
                "town",
                '<w:ddList><w:result w:val="1"/><w:listEntry w:val="Rome"/><w:listEntry w:val="Oslo"/></w:ddList>',
            ),
            ("first", '<w:ddList><w:listEntry w:val="Rome"/><w:listEntry w:val="Oslo"/></w:ddList>'),
            ("none", '<w:ddList><w:result w:val="7"/><w:listEntry w:val="Rome"/></w:ddList>'),
        )
    )
    assert text_of(word(body)).split("\n\n") == ["☒ on", "☐ off", "☒ default", "Oslo town", "Rome first", "none"]


def test_fields_show_their_results_and_not_their_instructions() -> None:
    def mark(kind: str) -> str:
        return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'

    def field(instruction: str, result: str) -> str:
        return mark("begin") + instruction + mark("separate") + result + mark("end")

    code = "<w:r><w:instrText>CODE</w:instrText></w:r>"
    inner = field(code, run("CODE"))
    outer = field(code + inner + code, run("Mr ") + field(code, run("Smith")))
    box = '<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:checkBox/></w:ffData></w:fldChar></w:r>'
    without_result = mark("begin") + code + inner + mark("end")
    body = f"<w:p>{run('Dear ')}{outer}{without_result}{run(', ')}{box}{code}{mark('end')}</w:p>"
    # Two fields that are not well formed hide nothing.
    body += f"<w:p>{mark('end')}{mark('separate')}{run('a')}{mark('begin')}{code}{run('b')}</w:p>{p('c')}"
    assert text_of(word(body)) == "Dear Mr Smith, ☐\n\nab\n\nc"


def test_a_docx_without_text_is_refused() -> None:
    assert "no text" in refusal(saved(docx.Document())).message
    assert "OCR" in refusal(word("<w:p/>")).hint


def test_deep_docx_is_read_and_damaged_xml_is_refused() -> None:
    deep = 100_000
    assert text_of(word("<w:x>" * deep + p("deep") + "</w:x>" * deep)) == "deep"
    tables = "<w:tbl><w:tr><w:tc>" * 1000 + p("deep") + "</w:tc></w:tr></w:tbl>" * 1000
    assert text_of(word(tables)) == "deep"
    for body in ("<w:p>", "</w:p>", "&nothing;", "\x01", "<w:p></w:q>"):
        assert "damaged at word/document.xml" in refusal(word(body)).message
    assert "encoding" in refusal(word(p("x"), '<?xml version="1.0" encoding="no-such"?>')).message


def test_xml_entities_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    bomb = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "lol" * 100}">' for n in range(10))
    for declaration, use in [
        (bomb, "&e9;"),
        (f'<!ENTITY x SYSTEM "file://{secret}">', "&x;"),
        (f'<!ENTITY % x SYSTEM "file://{secret}"> %x;', "text"),
        ('<!ENTITY x SYSTEM "http://127.0.0.1:9/">', "&x;"),
    ]:
        assert "entities" in refusal(word(p(use), f"<!DOCTYPE d [{declaration}]>")).message
    assert text_of(word(p("text"), f'<!DOCTYPE d SYSTEM "file://{secret}">')) == "text"


# HTML --------------------------------------------------------------------------------------------------------------


def page(text: str) -> str:
    return text_of(text.encode(), "page.html")


def test_html_has_its_paragraphs_lists_tables_and_headings() -> None:
    assert page(
        "<!DOCTYPE html><html><head><title>not this</title><style>p{}</style></head><body><nav><a href=x>Home</a></nav>"
        "<h1>The <em>great</em>\n case</h1><p>One   line,<br>a second &amp; last &eacute;.<p>Another"
        "<script>if (a < b) document.write('<p>no</p>')</script> one.<!-- no -->"
        "<ul><li>first<li><p>second</p><p>more</p><ol start=3><li>inner</ol></ul>"
        "<pre>  kept\n   as it is</pre><div>tail<div>end</div></div><img alt='a picture'></body></html>"
    ) == (
        "Home\n\n# The great case\n\nOne line,\na second & last é.\n\nAnother one.\n\n- first\n- second\n\nmore\n\n"
        "  3. inner\n\n  kept\n   as it is\n\ntail\n\nend\n\na picture"
    )


def test_html_tables_are_rows_unless_they_are_layout() -> None:
    rows = "<table><caption>Prices</caption><tr><th>A<th>B<tbody><tr><td><p>1</p><td>2<br>3<tr><td colspan=2>all</table>end"
    assert page(rows) == "Prices\n\nA | B\n1 | 2 3\nall\n\nend"
    layout = f"<table><tr><td>menu<td><h1>Title</h1><p>one<p>two{rows}</table>"
    assert page(layout) == "menu\n\n# Title\n\none\n\ntwo\n\nPrices\n\nA | B\n1 | 2 3\nall\n\nend"
    assert page("<td>a<td>b</table><p>c") == "a\n\nb\n\nc"


def test_html_lists_have_the_numbers_that_a_browser_shows() -> None:
    assert page("<ol start=' 5 '><li>a<li value=10>b<li>c</ol><ol start=-1><li>d<li>e</ol>") == (
        "5. a\n10. b\n11. c\n-1. d\n0. e"
    )
    assert page("<ol type=a start=26><li>x<li>y<li><ol type=I start=4><li>z</ol></ol>") == "z. x\naa. y\n  IV. z"
    assert page("<ol type=i><li value=0>a<li>b<li value=4000>c</ol>") == "0. a\ni. b\n4000. c"
    # How many items follow is unknown.
    assert page("<ol reversed start=3><li>a<li>b</ol><p>or<ol reversed><li>a</ol>") == "3. a\n2. b\n\nor\n\n- a"
    assert page("<ul><li value=3>a</ul><p>or<ol start=x><li value=y>b</ol><li value=2>c") == "- a\n\nor\n\n1. b\n- c"


def test_items_that_begin_with_another_block_keep_their_number() -> None:
    assert page("<ol><li><h3>Head</h3><p>text</p><li>two</ol><ul><li><h4>Head</h4></ul>") == (
        "### 1. Head\n\ntext\n\n2. two\n\n#### Head"
    )
    assert page("<ol><li><pre> code</pre><p>then</p><li><pre>\n  a\n b</pre><li>c</ol>") == (
        "1. code\n\nthen\n\n2.\n  a\n b\n3. c"
    )


def test_a_formula_of_katex_is_read_once() -> None:
    def katex(mathml: str, drawn: str = "<span>2<span>10</span></span>") -> str:
        return f'a <span class="katex">{mathml}<span aria-hidden="true" class="katex-html x">{drawn}</span></span> b'

    mathml = '<span class="katex-mathml"><math><msup><mn>2</mn><mn>10</mn></msup></math></span>'
    assert page(f"<p>{katex(mathml)}") == "a 2¹⁰ b"
    assert page(f"<p>{katex(mathml)} {katex('', '2')}") == "a 2¹⁰ b a 2 b"
    assert page(f"<p>{katex(mathml, '<span>2<span>10')}</p>c") == "a 2¹⁰\n\nc"


def test_templates_in_templates_are_no_text() -> None:
    assert page("a<template><p>b<template>c</template>d</template>e") == "ae"


def test_wide_and_high_cells_keep_the_columns() -> None:
    head = "<tr><th rowspan=2>Year<th colspan=2>Q1<th>Q2<tr><th>in<th>out<th>in"
    assert page(f"<table>{head}<tr><td>2024<td>1<td>2<td>3<tr><td colspan=9>all</table>") == (
        "Year | Q1 |  | Q2\n| in | out | in\n2024 | 1 | 2 | 3\nall"
    )
    assert page("<table><tr><td>a<td rowspan=0>b<tr><td>c<td>d</table>") == "a | b\nc | d"
    assert page("<table><tr><td rowspan=2>a<td>b<tr><td><p>c<p>d</table>") == "a | b\n| c d"

    def cell(text: str, span: int = 1) -> str:
        return f'<w:tc><w:tcPr><w:gridSpan w:val="{span}"/></w:tcPr>{p(text)}</w:tc>'

    rows = (cell("Q1", 2) + cell("Q2"), cell("in") + cell("out") + cell("in"), cell("all", 3))
    assert text_of(word(f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>")) == (
        "Q1 |  | Q2\nin | out | in\nall"
    )
    # Rows that begin further right, and previous properties of a row and a cell.
    was = '<w:trPrChange><w:trPr><w:gridBefore w:val="1"/></w:trPr></w:trPrChange>'
    wide = '<w:tcPrChange><w:tcPr><w:gridSpan w:val="2"/></w:tcPr></w:tcPrChange>'
    head = cell("A") + f"<w:tc><w:tcPr>{wide}</w:tcPr>{p('B')}</w:tc>" + cell("C")
    rows = tuple(
        f'<w:trPr><w:gridBefore w:val="{columns}"/>{was}</w:trPr>{cells}'
        for columns, cells in ((0, head), (1, cell("2") + cell("3")), (2, cell("3")))
    )
    assert text_of(word(f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>")) == (
        "A | B | C\n| 2 | 3\n|  | 3"
    )
    # Page layout: several paragraphs in the only cell with text.
    cells = f"<w:tc>{p('one')}{p('two')}</w:tc>"
    indented = f'<w:tr><w:trPr><w:gridBefore w:val="1"/></w:trPr>{cells}</w:tr>'
    assert text_of(word(f"<w:tbl>{indented}<w:tr>{cells}{cell('')}</w:tr></w:tbl>")) == "one\n\ntwo\n\none\n\ntwo"


def test_raised_numbers_are_not_joined_to_others() -> None:
    assert page("10<sup>6</sup>, m<sup><a href=x>-2</a></sup>, H<sub>2</sub>O, 4<sup>th</sup>, x<sub>i</sub>") == (
        "10⁶, m⁻², H₂O, 4th, xi"
    )
    assert page("a<sup><p>1</p></sup>b</sup>") == "a\n\n1\n\nb"
    # In several pieces, and with other levels, whose numbers stay apart.
    assert page("10<sup><span>−</span>6</sup>, 10<sup><b>1</b><i>2</i></sup>, 2<sup>n<sub>1</sub></sup>") == (
        "10⁻⁶, 10¹², 2n₁"
    )

    def run(text: str, align: str = "baseline") -> str:
        return f'<w:r><w:rPr><w:vertAlign w:val="{align}"/></w:rPr><w:t>{text}</w:t></w:r>'

    body = run("10") + run("6", "superscript") + run(" CO") + run("2", "subscript") + run("no", "superscript")
    assert text_of(word(f"<w:p>{body}</w:p>")) == "10⁶ CO₂no"


def test_numbers_that_a_style_or_a_distance_raises_are_not_joined_to_others() -> None:
    up = '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>'
    styles = (
        f'<w:styles {W}><w:style w:styleId="Up">{up}</w:style><w:style w:styleId="UpToo"><w:basedOn w:val="Up"/></w:style>'
        f'<w:style w:styleId="Raised"><w:rPr><w:position w:val="8"/></w:rPr></w:style>'
        '<w:style w:styleId="Not"><w:basedOn w:val="Raised"/><w:rPr><w:position w:val="0"/></w:rPr></w:style>'
        f'<w:style w:type="paragraph" w:styleId="P">{up}</w:style>'
        f'<w:style w:styleId="Was"><w:rPr><w:rPrChange>{up}</w:rPrChange></w:rPr></w:style></w:styles>'
    )

    def after(text: str, properties: str) -> str:
        return run(text) + run("6", properties)

    body = [
        after("a", '<w:rStyle w:val="Up"/>') + after(" b", '<w:rStyle w:val="UpToo"/>'),
        after("c", '<w:rStyle w:val="Up"/><w:vertAlign w:val="baseline"/>') + after("d", '<w:rStyle w:val="Was"/>'),
        after("e", '<w:rStyle w:val="Raised"/>') + run("7", '<w:position w:val="8"/>'),
        # Moved to its line or its cell, not to a number.
        after("f", '<w:position w:val="2"/>') + after("g", '<w:position w:val="-8"/>'),
        after("h ", '<w:position w:val="8"/>'),
        run("500", '<w:position w:val="8"/>'),
        # As Word splits a text into runs.
        "".join(run(text, '<w:position w:val="8"/>') for text in ("No. 20", "24", "-", "7")) + after(" i", up[7:-8]),
        after("j", '<w:rStyle w:val="Raised"/><w:position w:val="0"/>') + after("k", '<w:rStyle w:val="Not"/>'),
        after("l", '<w:vertAlign w:val="baseline"/><w:position w:val="8"/>'),
    ]
    document = word("".join(f"<w:p>{runs}</w:p>" for runs in body) + p("1", '<w:pStyle w:val="P"/>'), styles=styles)
    texts = ["a⁶ b⁶", "c6d6", "e⁶⁷", "f6g6", "h 6", "500", "No. 2024-7 i⁶", "j6k6", "l⁶", "¹"]
    assert text_of(document).split("\n\n") == texts


def test_formulas_are_on_one_line() -> None:
    """A fraction read without its bar is another number."""

    def math(xml: str) -> str:
        return text_of(word(f"<w:p><w:r><w:t>A </w:t></w:r><m:oMath {MATH}>{xml}</m:oMath></w:p>")).removeprefix("A ")

    def r(text: str) -> str:
        return f"<m:r><m:t>{text}</m:t></m:r>"

    def of(name: str, **parts: str) -> str:
        return f"<m:{name}>{''.join(f'<m:{part}>{xml}</m:{part}>' for part, xml in parts.items())}</m:{name}>"

    assert math(of("f", num=r("1"), den=r("2"))) == "1/2"
    assert math(of("f", num=r("a+b"), den=of("f", num=r("c"), den=r("3")))) == "(a+b)/(c/3)"
    assert math(of("sSup", e=r("x"), sup=r("2")) + r("+") + of("sSubSup", e=r("y"), sub=r("i"), sup=r("n+k"))) == (
        "x²+y_i^(n+k)"
    )
    assert math(of("d", e=r("x+1")) + of("d", dPr='<m:begChr m:val="["/><m:endChr m:val=""/>', e=r("y"))) == "(x+1)[y"
    assert math(of("nary", naryPr='<m:chr m:val="∑"/>', sub=r("i=1"), sup=r("9"), e=r("i"))) == "∑_(i=1)⁹ i"
    assert math(of("rad", deg=r("3"), e=r("x+1")) + of("func", fName=r("sin"), e=r("t"))) == "³√(x+1)sin t"
    assert math(of("m", mr=f"<m:e>{r('1')}</m:e><m:e>{r('0')}</m:e>")) == "[1, 0]"
    rows = "".join(f"<m:e>{r(row)}</m:e>" for row in ("0, &amp;x&lt;5", "10,&amp;x≥5"))
    assert math(of("d", dPr='<m:begChr m:val="{"/><m:endChr m:val=""/>', e=f"<m:eqArr>{rows}</m:eqArr>")) == (
        "{0, x<5; 10, x≥5"
    )
    assert math(of("limLow", e=r("lim"), lim=r("x→0")) + of("limUpp", e=r("y"), lim=r("2"))) == "lim_(x→0)y²"
    assert math(of("acc", e=r("x")) + of("acc", accPr='<m:chr m:val="\u20d7"/>', e=r("a+b"))) == "x\u0302(a+b)\u20d7"
    assert math(of("bar", e=r("x")) + of("bar", barPr='<m:pos m:val="top"/>', e=r("y"))) == "x\u0332y\u0305"
    # Without its bar a fraction is a binomial in round brackets, and two rows elsewhere.
    stack = of("f", fPr='<m:type m:val="noBar"/>', num=r("i&lt;5"), den=r("j"))
    assert math(of("d", e=stack) + r("=") + of("d", e=r("2") + stack)) == "C(i<5, j)=(2i<5; j)"
    assert math(of("nary", naryPr='<m:chr m:val="∑"/>', sub=stack, e=r("a"))) == "∑_(i<5; j) a"
    assert math(of("d", dPr='<m:begChr m:val="{"/><m:endChr m:val=""/>', e=stack)) == "{i<5; j"
    # The scripts are not those of the 2.
    assert math(r("2") + of("sPre", sub=r("6"), sup=r("14"), e=r("C"))) == "2 ₆¹⁴C"

    def page_math(xml: str) -> str:
        return page(f"<p>A <math>\n {xml}</math> b").removeprefix("A ").removesuffix(" b")

    assert page_math("<mfrac><mn>1</mn> <mrow><mi>x</mi><mo>+</mo><mi>y</mi></mrow></mfrac>") == "1/(x+y)"
    assert page_math("<msup><mi>x</mi><mn>2</mn></msup><msubsup><mi>y</mi><mi>i</mi><mi>n</mi></msubsup>") == "x²y_iⁿ"
    assert (
        page_math("<semantics><mroot><mi>x</mi><mn>3</mn></mroot><annotation>x^{1/3}</annotation></semantics>") == "³√x"
    )
    assert page_math("<mfenced open='['><mi>a</mi><mi>b</mi></mfenced><msqrt><mn>2</mn></msqrt>") == "[a,b)√2"
    stack = "<mfrac linethickness='0px'><mn>5</mn><mn>2</mn></mfrac>"
    assert page_math(f"<mo>(</mo>{stack}<mo>)</mo><mo>=</mo><mn>10</mn>") == "C(5, 2)=10"
    brackets = [f"<mrow><mo fence='true'>{bracket}</mo></mrow>" for bracket in "()"]
    assert page_math(f"<mrow>{brackets[0]}\n<mstyle>{stack}</mstyle>{brackets[1]}</mrow>") == "C(5, 2)"
    assert page_math(f"<mfenced>{stack}</mfenced><mfenced open='['>{stack}</mfenced>") == "C(5, 2)[5; 2)"
    assert page_math(f"<munder><mo>∑</mo>{stack}</munder><mi>f</mi><mo>(</mo>{stack}<mi>x</mi><mo>)</mo>") == (
        "∑_(5; 2)f(5; 2x)"
    )
    assert page_math("<mfrac linethickness='0.5px'><mn>5</mn><mn>2</mn></mfrac>") == "5/2"
    before = "<mprescripts/><mn>6</mn><mn>14</mn>"
    assert page_math(f"<mn>2</mn><mmultiscripts><mi>C</mi><none/><mn>4</mn>{before}</mmultiscripts>") == "2 ₆¹⁴C⁴"
    after = "<mn>1</mn><none/><mn>2</mn><mi>k</mi>"
    before = "<mprescripts/><mi>i</mi><none/>"
    assert page_math(f"<mmultiscripts><mi>R</mi>{after}{before}</mmultiscripts>") == "_i R_(1, 2)^k"
    row = "<mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd>"
    assert page_math(f"<mtable><mtr>{row}</mtr><mlabeledtr>{row}</mlabeledtr></mtable>") == "[1, 2; 1, 2]"
    # No word is lost in a formula that does not end, or in one that is not as it should be.
    assert page("<p>a <math><mfrac><mn>1<p>b <msup>c</math> d") == "a 1/\n\nb c d"
    assert page("<math>" * 3000 + "deep" + "<mrow>" * 3000 + "er</math> end") == "deeper end"


def test_soft_hyphens_are_no_characters_of_a_word() -> None:
    assert page("Donau&shy;dampf&shy;schiff") == "Donaudampfschiff"
    mark = b"1 beginbfchar <41> <00ad> endbfchar"
    assert text_of(pdf(lines("xAy"), font=HELVETICA)) == "xAy"
    named = HELVETICA[:-2] + b"/ToUnicode 5 0 R >>"
    cmap = b"/CIDInit begincmap 1 begincodespacerange <00> <ff> endcodespacerange %s endcmap" % mark
    assert "-" in text_of(pdf(lines("xAy"), font=named, more=[stream(cmap)]))


def test_html_is_decoded_by_what_it_declares() -> None:
    for encoding, label in [
        ("utf-8", None),
        ("cp1252", "ISO-8859-1"),
        ("shift_jis", "Shift_JIS"),
        ("koi8-r", "koi8-r"),
    ]:
        words = {"shift_jis": "日本語", "koi8-r": "Привет"}.get(encoding, "café – €")
        head = f"<meta charset='{label}'>" if label else ""
        assert text_of(f"{head}<p>{words}".encode(encoding), "x.htm") == words
        head = f'<meta http-equiv="Content-Type" content="text/html; charset={label}">' if label else ""
        assert text_of(f"{head}<p>{words}".encode(encoding), "x.htm") == words
    assert text_of("<?xml version='1.0' encoding='koi8-r'?><p>Привет</p>".encode("koi8-r"), "x.xhtml") == "Привет"
    assert text_of("<p>日本".encode("utf-16"), "x.html") == "日本"
    assert text_of("<meta charset=utf-16><p>é".encode(), "x.html") == "é"
    assert text_of("<meta charset=hex><p>é".encode(), "x.html") == "é"
    assert "0xe9 at offset 3" in refusal(b"<p>\xe9", "x.html").message
    assert "binary" in refusal(b"<p>a\0b", "x.html").message


@pytest.mark.parametrize(
    ("label", "encoding", "words"),
    [
        ("Shift_JIS", "cp932", "①㈱髙"),
        ("x-sjis", "cp932", "①日本"),
        ("windows-31j", "cp932", "①日本"),
        ("euc-kr", "cp949", "똠방각하"),
        ("windows-949", "cp949", "똠방각하"),
        ("Big5", "big5hkscs", "着"),
        ("Big5", "cp950", "價格 5 €"),
        ("x-x-big5", "cp950", "價格 5 €"),
        ("tis-620", "cp874", "ไทย – €"),
        ("windows-874", "cp874", "ไทย – €"),
        ("iso-8859-8-i", "iso8859-8", "שלום"),
    ],
)
def test_labels_of_encodings_are_those_of_browsers(label: str, encoding: str, words: str) -> None:
    assert text_of(f"<meta charset={label}><p>{words}".encode(encoding), "x.html") == words


def test_a_page_that_cannot_be_decoded_has_a_hint_that_fits() -> None:
    def hint(raw: bytes) -> str:
        return refusal(raw, "x.html").hint

    for head in (b"", b"<meta charset=UTF-8>"):
        assert "CP1252" in hint(head + b"<p>\xe9")
    assert hint(b"<meta charset=Shift_JIS><p>\x82 ") == (
        "it declares Shift_JIS, which it is not: convert it from its true encoding to UTF-8"
    )
    assert hint(b"<meta charset=klingon><p>\xe9").startswith("it declares klingon, which is no known encoding:")
    assert "mark is that of utf-16" in hint(b"\xff\xfea")


def test_html_with_nothing_is_refused() -> None:
    for raw in (b"", b"<html><body></body></html>", b"<title>t</title><script>x</script>", b"<p>&nbsp;<p> "):
        assert "no text" in refusal(raw, "x.html").message


@pytest.mark.slow
def test_hostile_html_is_read_in_time() -> None:
    deep = 200_000
    assert page("<div>" * deep + "in" + "</div>" * deep) == "in"
    assert page("<table><tr><td>" * 20_000 + "in") == "in"
    assert page("<ol>" * 20_000 + "<li>in").strip() == "1. in"
    assert page("</p></td></table></ul></h1></pre>out") == "out"
    for opened in ("<a ", "<a b='", "<!--", "<![CDATA[", "<?", "</", "<script>"):
        for closed in ("", ">"):
            assert page("in" + opened * 30_000 + closed).startswith("in")
    assert page('<!DOCTYPE html [<!ENTITY x "y">]><p>a&x;').endswith("a&x;")
    assert (
        page("<p>a<![if !supportLists]>b<![endif]>c<![bogus]>d<![CDATA[e<p>f]]>g<!bogus>h<?php x?>i</>j")
        == "abcde<p>fghij"
    )


VISIBLE = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=8)


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> tuple[str, list[str]]:
    """Well formed and less well formed HTML, and the words that a reader sees."""
    source, seen = "", []
    for _ in range(draw(st.integers(0, 4))):
        what = draw(st.integers(0, 6 if depth else 1))
        if what <= 1:
            text = draw(VISIBLE)
            seen.append(text)
            source += draw(st.sampled_from([" ", "\n", "<p>", "<br>", "<hr/>", "</div> "])) + escape(text) + " "
        elif what == 2:
            name = draw(st.sampled_from(["script", "style", "template"]))
            source += f"<{name}>{draw(st.sampled_from(['hidden', '<b>a', 'a<p>', '']))}</{name}> <!-- hidden --> "
        else:
            tags = (
                "div p span b ul li ol table tr td th h1 h4 blockquote a section dl dd unknown-tag pre tbody nav footer"
            )
            name = draw(st.sampled_from(tags.split()))
            inner, words = draw(trees(depth=depth - 1))
            seen += words
            source += f" <{name} class='{draw(st.sampled_from(['x', 'hidden', '<p>']))}'>{inner}"
            source += draw(st.sampled_from([f"</{name}> ", f"</{name}\n> ", " "]))
    return source, seen


@given(trees())
@example(("<h1><table><tr><td>a</td><td><li>b</td></table>", ["a", "b"]))
def test_every_visible_word_of_html_survives_in_order(tree: tuple[str, list[str]]) -> None:
    source, words = tree
    # Other output consists of marks of rows, lists and headings.
    shown = iter(page(source + "<p>end").split())
    for word_ in [*words, "end"]:
        for piece in page(escape(word_)).split():
            assert any(piece == other for other in shown), (word_, source)


@given(st.text(max_size=200))
@example("<![")
@example("<!")
@example("<!doctype [")
@example("&#xd800;&#0;&#x110000;")
def test_any_text_is_html_or_refused(source: str) -> None:
    with contextlib.suppress(InputError):
        text_of(source.encode("utf-8", "replace"), "x.html")


# EPUB --------------------------------------------------------------------------------------------------------------


def epub(chapters: dict[str, str], spine: Sequence[str] | None = None, **more: str) -> bytes:
    items = "".join(
        f'<item id="{index}" href="{name}" media-type="application/xhtml+xml"/>' for index, name in enumerate(chapters)
    )
    order = [list(chapters).index(name) for name in spine or chapters]
    refs = "".join(f'<itemref idref="{index}"/>' for index in order)
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}<item id="c" href="c.png" media-type="image/png"/>'
        f'</manifest><spine><itemref idref="c"/>{refs}</spine></package>'
    )
    members: dict[str, bytes | str] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        "OEBPS/book.opf": package,
    }
    for name, text in chapters.items():
        if text:
            members["OEBPS/" + name.replace("%20", " ")] = text
    return zipped(members | {f"META-INF/{name}.xml": text for name, text in more.items()})


def chapter(text: str) -> str:
    return (
        '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" '
        '"http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd"><html xmlns="http://www.w3.org/1999/xhtml"><head>'
        f'<title>not this</title><script src="x.js"/></head><body>{text}</body></html>'
    )


def test_an_epub_is_read_in_the_order_of_its_spine() -> None:
    chapters = {
        "b%20two.xhtml": chapter("<h2>Two</h2><p>caf&eacute;</p>"),
        "text/../a.xhtml": chapter("<h2>One</h2><p/>words"),
        "cover.xhtml": chapter("<img src='c.png'/>"),
    }
    raw = epub(
        {name: text for name, text in chapters.items() if ".." not in name} | {"a.xhtml": chapters["text/../a.xhtml"]},
        ["cover.xhtml", "a.xhtml", "b%20two.xhtml"],
    )
    document = prompts.from_bytes("book.epub", raw)
    assert document.text == "## One\n\nwords\n\n## Two\n\ncafé"
    assert document.warnings == ()


def test_a_chapter_that_is_missing_is_a_warning() -> None:
    raw = epub({"a.xhtml": chapter("words"), "b.xhtml": ""})
    assert prompts.from_bytes("x", raw).warnings == ("1 of 2 chapters are missing, first OEBPS/b.xhtml",)
    assert "lacks OEBPS/b.xhtml" in refusal(epub({"b.xhtml": ""})).message


def test_a_book_with_rights_management_is_refused() -> None:
    def locked(member: str) -> str:
        namespaces = (
            'xmlns="urn:oasis:names:tc:opendocument:xmlns:container" xmlns:e="http://www.w3.org/2001/04/xmlenc#"'
        )
        data = f'<e:CipherData><e:CipherReference URI="{member}"/></e:CipherData>'
        return f"<encryption {namespaces}><e:EncryptedData>{data}</e:EncryptedData></encryption>"

    chapters = {"a.xhtml": chapter("words")}
    assert "rights" in refusal(epub(chapters, encryption=locked("OEBPS/a.xhtml"))).message
    assert text_of(epub(chapters, encryption=locked("OEBPS/font.otf"))) == "words"


# Archives ----------------------------------------------------------------------------------------------------------


def test_archives_that_are_no_document_are_named() -> None:
    assert "a zip archive" in refusal(zipped({"a.txt": "text"})).message
    assert "Excel" in refusal(zipped({"xl/workbook.xml": "<x/>"})).message
    assert "OpenDocument text" in refusal(zipped({"mimetype": "application/vnd.oasis.opendocument.text"})).message
    assert "a zip archive" in refusal(zipped({})).message


def test_a_zip_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = epub({"a.xhtml": chapter("<p>words" + " " * 3_000_000)})
    text_of(raw)
    monkeypatch.setattr(prompts, "BYTES_MAX", 2_000_000)
    assert "more than 2000000 bytes" in refusal(raw).message
    # A declared size that is too small, here and in the central directory, does not bypass the limit.
    size = len(chapter("<p>words" + " " * 3_000_000))
    refusal(raw.replace(struct.pack("<I", size), struct.pack("<I", 1000)))
    # Nor does a member that is referenced many times.
    twice = epub({"a.xhtml": chapter("<p>words" + " " * 30_000)}, ["a.xhtml"] * 100)
    assert "more than 2000000 bytes" in refusal(twice).message


def test_an_encrypted_archive_is_refused() -> None:
    raw = bytearray(word(p("text")))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := raw.find(signature, at + 1)) >= 0:
            raw[at + offset] |= 1
    assert "encrypted" in refusal(bytes(raw)).message


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_are_read_or_refused(seed: int) -> None:
    import random

    chosen = random.Random(seed)
    for raw in samples():
        for _ in range(40):
            damaged = bytearray(raw)
            for _ in range(chosen.choice([1, 5, 50])):
                damaged[chosen.randrange(8, len(damaged))] = chosen.randrange(256)
            tried(bytes(damaged))


def samples() -> Iterator[bytes]:
    """One document of each kind."""
    yield pdf(lines("one", "two"), SCAN, lines("three"))
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf(lines("packed", "lines"), lines("more"))))
    for sheet in writer.pages:
        sheet.compress_content_streams()
    packed = io.BytesIO()
    writer.write(packed)
    yield packed.getvalue()
    yield encrypted(pdf(lines("one")), "", "AES-256")
    document = docx.Document()
    document.add_heading("Title")
    document.add_paragraph("text", style="List Number")
    yield saved(document)
    yield epub({"a.xhtml": chapter("<p>words"), "b.xhtml": chapter("more")})


def tried(raw: bytes) -> None:
    """Reads a document; the result must be text or an `InputError`."""
    with contextlib.suppress(InputError):
        assert prompts.from_bytes("document", raw).text.strip()


def test_truncated_documents_are_read_or_refused() -> None:
    for raw in samples():
        for step in range(1, 50):
            tried(raw[: len(raw) * step // 50])


# Kinds -------------------------------------------------------------------------------------------------------------


def test_content_decides_before_the_name() -> None:
    assert text_of(pdf(lines("words")), "x.txt") == "words"
    assert text_of(b"\xef\xbb\xbf\n" + pdf(lines("words")), "x") == "words"
    assert text_of(b"junk in front\n" + pdf(lines("words")), "x.pdf") == "words"
    assert text_of(b"It begins with %PDF-1.7\n", "x.txt") == "It begins with %PDF-1.7\n"
    assert text_of(word(p("words")), "x.html") == "words"
    assert text_of(b"<p>a  b\r\n", "x.md") == "<p>a  b\r\n"
    assert text_of(b"<p>a</p>", "X.HTML") == "a"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), ["before 2007", "DOCX"]),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "EncryptedPackage".encode("utf-16-le"), ["encrypted", "password"]),
        (b"{\\rtf1 text}", ["RTF", "DOCX"]),
        (b"\x89PNG\r\n\x1a\n\0\0", ["binary", "PNG", "OCR"]),
        (b"\xff\xd8\xff\xe0", ["binary", "JPEG"]),
        (b"II*\0", ["binary", "TIFF"]),
        (b"RIFF\0\0\0\0WEBPVP8 ", ["binary", "WebP"]),
        (b"GIF89a\x01\0\x01\0\x80\0\0", ["binary", "GIF"]),
        (b"AT&TFORM\0\0\0\0DJVU", ["binary", "DjVu"]),
        (bz2.compress(b"x"), ["bzip2", "unpack"]),
        (bz2.compress(b""), ["bzip2", "unpack"]),
        (b"\x1f\x8b\x08\0", ["gzip", "unpack"]),
        (b"MZ\0\0", ["binary", "offset 2", "PDF"]),
        (b"%PDF-", ["damaged"]),
        (b"%PDF-1.7\nnothing of the kind", ["damaged"]),
        (b"PK\x03\x04", ["damaged"]),
    ],
)
def test_unsupported_files_are_one_error(
    fake: object, quantspec: Run, tmp_path: Path, raw: bytes, words: list[str]
) -> None:
    path = tmp_path / "book"
    path.write_bytes(raw)
    quantspec("run", "--prompt", str(path)).assert_error(1, str(path), *words)


@pytest.mark.parametrize(
    "text",
    [
        "BZhang Corp. reports",
        "GIF89a is a format of images.",
        "{\\rtf begins RTF.",
        "AT&TFORM 12",
        "RIFF, a WEBP file",
    ],
)
def test_words_that_begin_like_a_binary_file_are_text(text: str) -> None:
    assert text_of(text.encode()) == text


# Commands ----------------------------------------------------------------------------------------------------------


def test_run_reads_a_pdf_and_shows_what_is_missing(fake: object, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / "case.pdf"
    path.write_bytes(pdf(lines("some words"), SCAN))
    text = tmp_path / "case.txt"
    text.write_text("some words")
    warning = "page 2 of 2 has no text"
    arguments = ["run", "--prompt", str(path), "--prompt", str(text), "-n", "3", "--json"]
    done = quantspec(*arguments)
    assert done.code == 0, done
    of_pdf, of_text = done.json["results"]
    assert f"warning: {path}: {warning}\n" in done.stderr
    assert of_pdf.pop("warnings") == [warning]
    assert (of_pdf.pop("prompt"), of_text.pop("prompt")) == (str(path), str(text))
    assert of_pdf == of_text
    assert quantspec(*arguments, "--quiet").stderr == ""


def test_a_batch_shows_what_is_missing(fake: object, quantspec: Run, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "case.pdf").write_bytes(pdf(lines("some words"), SCAN))
    (docs / "scan.pdf").write_bytes(pdf(SCAN))
    (docs / "text.txt").write_text("some words")
    warning = "page 2 of 2 has no text"
    page = tmp_path / "page.html"
    command = ["batch", str(docs), "--out", str(tmp_path / "out"), "-n", "3"]
    planned = quantspec(*command, "--dry-run")
    assert f"\nwarning: case.pdf: {warning}\n" in planned.stdout
    rows = quantspec(*command, "--dry-run", "--json").json["results"]
    assert [row.get("warnings") for row in rows] == [[warning], None, None]
    done = quantspec(*command, "--report", str(page))
    assert [line for line in done.stderr.splitlines() if "warning" in line] == [f"warning: case.pdf: {warning}"]
    assert warning in page.read_text()
    # A later run shows them as well, unless the document is not one of its own.
    (docs / "new.txt").write_text('"warnings": [')
    resumed = quantspec(*command)
    assert "1 done, 1 failed, 2 done before" in resumed.stderr
    assert [line for line in resumed.stderr.splitlines() if "warning" in line] == [f"warning: case.pdf: {warning}"]
    assert "warning" not in quantspec("batch", str(docs / "text.txt"), *command[2:]).stderr
    (docs / "new.txt").unlink()
    again = quantspec(*command, "--no-resume", "--json", "--quiet")
    assert {row["document"]: row.get("warnings") for row in again.json["results"]} == {
        "case.pdf": [warning],
        "scan.pdf": None,
        "text.txt": None,
    }
    assert "warning" not in again.stderr


def test_eval_and_bench_show_what_is_missing(fake: object, quantspec: Run, tmp_path: Path) -> None:
    path = tmp_path / "case.pdf"
    path.write_bytes(pdf(lines(*["some words"] * 40), SCAN))
    for command in (["eval", "--tokens", "20"], ["bench", "-p", "8", "-n", "4", "-r", "1"]):
        done = quantspec(*command, "--prompt", str(path))
        assert "warning" in done.stderr, done
        assert "page 2 of 2 has no text" in done.stderr


def test_standard_input_may_be_a_document(start: Start) -> None:
    raw = word(p("some words"))
    child = start("run", "--prompt", "-", "-n", "3", "--json", stdin=subprocess.PIPE)
    out, _ = child.communicate(raw, timeout=60)
    plain = start("run", "--text", "some words", "-n", "3", "--json").communicate(timeout=60)[0]
    assert json.loads(out)["results"][0]["tokens"] == json.loads(plain)["results"][0]["tokens"]


@pytest.mark.slow
def test_a_document_longer_than_one_read_is_read_completely(tmp_path: Path) -> None:
    body = "".join(p(f"{number} {number * 7919 % 104729}") for number in range(60_000))
    path = tmp_path / "long.docx"
    path.write_bytes(
        zipped(
            {
                name: zipfile.ZipFile(io.BytesIO(word(body))).read(name)
                for name in ("_rels/.rels", "word/_rels/document.xml.rels", "word/document.xml")
            },
            zipfile.ZIP_STORED,
        )
    )
    assert path.stat().st_size > 3 << 20
    assert prompts.read(str(path)).text.count("\n\n") == 59_999
    page_ = tmp_path / "long.html"
    page_.write_bytes(("<p>word" * 500_000).encode("utf-16"))
    assert prompts.read(str(page_)).text.count("word") == 500_000


@pytest.mark.slow
def test_ctrl_c_ends_the_reading_of_a_slow_document(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "slow.pdf"
    path.write_bytes(pdf(*[lines(*(f"line {number} of many" for number in range(50)))] * 2000))
    child = start("run", "--prompt", str(path))
    time.sleep(2)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out) == (130, b"")
    assert err.startswith(b"error: interrupted")


def test_plain_text_imports_no_reader(document: Path) -> None:
    program = (
        "import sys; from quantspec_cli import prompts; prompts.read(sys.argv[1]); "
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] in "
        "{'pypdf', 'cryptography', 'docx', 'lxml', 'zipfile', 'xml', 'html'} or name.startswith('quantspec_cli.documents')))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(document)], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["quantspec_cli.documents"]
