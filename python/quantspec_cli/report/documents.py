"""The page of `batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import render
from .charts import Series
from .page import Section, Table
from .sections import acceptance_by_position, command_page, memory_of, stack

if TYPE_CHECKING:
    from collections.abc import Mapping

    Row = Mapping[str, Any]

# Most documents in a table; a longer page is unreadable.
DOCUMENTS_MAX = 200


def batch(document: Row, engine: Row) -> str:
    """The page of `batch`: its document, and the engine's `info`, empty if nothing was decoded."""
    stats = document["stats"]
    sections = []
    if stats.get("decode_s") is not None:
        names = {"load_s": "load", "prefill_s": "prompts", "draft_s": "draft", "verify_s": "verify"}
        spent = [Series(shown, [stats[name]]) for name, shown in names.items()]
        sections.append(
            stack(
                "Time of the engine",
                "Loading, reading prompts, drafting and verifying.",
                ["engine"],
                spent,
                unit="time",
                shown=render.seconds,
            )
        )
        sections += acceptance_by_position([(document["model"], stats["acceptance_rate_per_position"])], of="model")
        sections += memory_of({document["model"]: stats}, "Memory of the engine.")
    results = document["results"]
    listed = results[:DOCUMENTS_MAX]
    more = f" The first {DOCUMENTS_MAX} of {len(results):,}." if len(results) > len(listed) else ""
    sections.append(
        Section(
            "Documents",
            f"{document['done']} done, {document['failed']} failed, {document['skipped']} skipped.{more}",
            None,
            [],
            Table(
                ["document", "status", "prompt tokens", "new tokens", "seconds", "ended by", "warnings"],
                [
                    [
                        row["document"],
                        row["status"],
                        "-" if row["prompt_tokens"] is None else f"{row['prompt_tokens']:,}",
                        f"{row['new_tokens']:,}",
                        f"{row['seconds']:.2f}",
                        row["stop_reason"] or (row["error"] or {}).get("message", "-"),
                        "; ".join(row.get("warnings", ())),
                    ]
                    for row in listed
                ],
                prose=("document", "ended by", "warnings"),
            ),
        )
    )
    facts = {
        "documents": f"{document['documents']:,}",
        "speed": ""
        if stats["documents_per_hour"] is None
        else f"{render.number(stats['documents_per_hour'])} documents/h",
    }
    return command_page("quantspec batch", [document["model"]], engine, sections, facts)
