"""Progress of a batch on stderr: rows of the running documents on a terminal, otherwise a line per finished document."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from . import render
from .errors import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from types import TracebackType

    from .batch_work import Job, RunningCall
    from .options import GenerateOptions

# Most rows of running documents; fits a terminal of 24 lines.
_ROWS = 16
# Lines of a terminal that are left for the totals, the rest of the running documents and the cursor.
_OTHER_LINES = 5
# Columns that a narrow terminal keeps for the names.
_NAME_COLUMNS = 16


class View:
    """The state of a running batch. A terminal is redrawn in place; other outputs get finished documents only."""

    def __init__(self, documents: int, skipped: int, failed: int, *, longest: int, shown: bool) -> None:
        """`skipped` are done by earlier runs, and `failed` failed in one. An answer has at most `longest` tokens."""
        self._documents, self._longest, self._shown = documents, longest, shown
        self._done, self._failed = skipped, failed
        self._started = 0.0
        self._live: Any = None
        # Tokens of all calls of finished documents; their rates give the estimate of the time left.
        self._prompt_tokens = self._new_tokens = self._answers = 0
        # Once all prompts are read: when an answer was first seen, and its tokens then.
        self._seen: dict[int, tuple[float, int]] = {}

    def __enter__(self) -> View:
        self._started = time.perf_counter()
        if self._shown and render.on_terminal():
            from rich.live import Live

            self._live = Live(console=render.console(), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def finished(self, result: Mapping[str, Any]) -> None:
        """Records that a document is done or has failed."""
        failed = result["status"] == "failed"
        self._failed += failed
        self._done += not failed
        if not failed:
            self._answers += 1
            for call in _calls(result.get("tree", result)):
                self._prompt_tokens += call["prompt_tokens"]
                self._new_tokens += call["new_tokens"]
        if self._shown and self._live is None:
            render.note(_line(result))

    def known(self, prompt_tokens: int, new_tokens: int) -> None:
        """Leaves a call of an earlier run out of the rates: `finished` adds the tokens of all calls of a document."""
        self._prompt_tokens -= prompt_tokens
        self._new_tokens -= new_tokens

    def show(self, running: Sequence[Job], waiting: Collection[Job]) -> None:
        """Draws the running documents and the totals."""
        if self._live is None:
            return
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        # Prompts that wait for a slot come last.
        running = sorted(running, key=lambda job: _stage(job) == "waiting")
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=_NAME_COLUMNS)
        for _ in range(3):
            table.add_column(no_wrap=True)
        rows = max(1, min(_ROWS, self._live.console.height - _OTHER_LINES))
        for job in running[:rows]:
            tokens = "" if job.tokens is None else render.count(job.tokens, "prompt token")
            # A long name is cut, so that every document takes one line.
            name = Text(one_line(job.source.shown), no_wrap=True, overflow="ellipsis")
            table.add_row(name, Text(_stage(job)), Text(_progress(job)), Text(tokens))
        if len(running) > rows:
            table.add_row(Text(f"and {len(running) - rows} more"))
        totals = Text(self.totals(running, waiting), style="dim", no_wrap=False, overflow="fold")
        self._live.update(Group(table, totals), refresh=True)

    def totals(self, running: Sequence[Job], waiting: Collection[Job]) -> str:
        """The documents so far, the time left, and the rates."""
        elapsed = time.perf_counter() - self._started
        parts = [f"{self._done + self._failed:,} of {render.count(self._documents, 'document')}"]
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        read = self._prompt_tokens + sum(_read_tokens(job) for job in running)
        new = self._new_tokens + sum(job.answer_tokens for job in running)
        new += sum(call.done for job in running for call in list(job.running) if call.stage == "decoding")
        # A copy, because workers take from the queue.
        left: float = sum(job.tokens or 0 for job in list(waiting))
        left += sum(max((job.tokens or 0) - _read_tokens(job), 0) for job in running)
        # The estimate takes an answer's time as proportional to its prompt. So it needs a first answer, of a document or of a
        # part, and it says nothing once all prompts are read.
        if (self._answers or any(job.done_calls for job in running)) and left and read:
            parts.append(f"about {duration(elapsed * left / read)} left")
        if left or waiting:
            self._seen.clear()
        elif (most := self._last_answers(running, elapsed)) is not None:
            parts.append(f"at most {duration(most)} left")
        parts.append(f"prompts {render.number(read / elapsed)} and answers {render.rate(new / elapsed)}")
        return ", ".join(parts)

    def _last_answers(self, running: Sequence[Job], elapsed: float) -> float | None:
        """Seconds until the last answers have as many tokens as they may, at their speeds. None if a speed is unknown, and
        for parts, because other calls follow their answers.
        """
        if any(job.known_calls for job in running):
            return None
        times = []
        for call in [call for job in running for call in list(job.running)]:
            since, before = self._seen.setdefault(id(call), (elapsed, call.done))
            new = call.done - before
            times.append((self._longest - call.done) * (elapsed - since) / new if new else None)
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None


def _stage(job: Job) -> str:
    """The stage of the document's calls that have come furthest; its own between calls."""
    stages = {call.stage for call in list(job.running)}
    return next((stage for stage in ("decoding", "reading", "waiting") if stage in stages), job.stage)


def _progress(job: Job) -> str:
    """How far the document's answer is: with map-reduce its calls, otherwise the tokens of its call."""
    if job.known_calls:
        return f"{job.done_calls:,} of {render.count(job.known_calls, 'call')}"
    for call in list(job.running):
        if call.stage == "decoding":
            return render.count(call.done, "token")
        if call.total:
            return f"{_share(call):4.0%}"
    return ""


def _share(call: RunningCall) -> float:
    """The share of a call's prompt that is processed."""
    return call.done / call.total if call.stage == "reading" and call.total else float(call.stage == "decoding")


def _read_tokens(job: Job) -> float:
    """Tokens of the document's prompts that are processed; map-reduce makes several."""
    return job.read_tokens + sum(_share(call) * call.tokens for call in list(job.running))


def _calls(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The calls of a result's tree."""
    yield node
    for part in node.get("parts", ()):
        yield from _calls(part)


def _line(result: Mapping[str, Any]) -> str:
    if result["status"] == "failed":
        return f"failed  {_failure(result)}"
    name = one_line(result["document"])
    calls = f"{result['calls']} calls, the last with " if result["calls"] > 1 else ""
    return (
        f"done    {name}: {calls}{render.count(result['prompt_tokens'], 'prompt token')}, "
        f"{render.count(result['new_tokens'], 'new token')} "
        f"({result['stop_reason']}), {render.seconds(result['seconds'])}"
    )


def _failure(result: Mapping[str, Any]) -> str:
    """A document's name and why it fails. Most reasons begin with the name."""
    name, reason = one_line(result["document"]), result["error"]["message"]
    return reason if reason.startswith((f"{name} ", f"{name}:")) else f"{name}: {reason}"


def failures(failed: Sequence[Mapping[str, Any]]) -> None:
    """Failed documents with their reasons and remedies."""
    for result in failed:
        render.note(f"failed  {_failure(result)}")
        render.note(f"        {result['error']['hint']}")


def summary(document: Mapping[str, Any], out: str) -> None:
    """The totals of a batch."""
    stats = document["stats"]
    parts = [f"{document['done']:,} done", f"{document['failed']:,} failed", f"{document['skipped']:,} done before"]
    left = document["documents"] - document["done"] - document["failed"] - document["skipped"]
    if left:
        parts.append(f"{left:,} not done")
    render.note(f"{render.count(document['documents'], 'document')}: {', '.join(parts)}; answers in {one_line(out)}")
    speed = [duration(stats["wall_s"])]
    if document["done"]:
        speed.append(f"{render.number(stats['documents_per_hour'])} documents per hour")
    if stats.get("rounds"):  # a cluster does not count them
        speed += [
            f"prefill {render.rate(stats['prefill_tokens_per_s'])}",
            f"decode {render.rate(stats['decode_tokens_per_s'])}",
        ]
        speed.append(f"{render.number(stats['batch_mean'])} at once on average")
    if len(speed) > 1:
        render.note(", ".join(speed))
    if lost := stats.get("workers_lost"):
        render.note(f"warning: {lost} of {render.count(stats['workers'], 'worker')} of the Ray cluster died")


def note_of_cuts(answers: int, options: GenerateOptions) -> None:
    """Notes that the token limit cut some answers, or stop strings some JSON."""
    if answers:
        what = f"{render.count(answers, 'answer')} {'was' if answers == 1 else 'were'}"
        ends, reason = [f"{render.count(options.max_new_tokens, 'token')} (-n)"], '"length"'
        if options.shortens:
            ends.append("the end of the context")
        if options.json_schema is not None and options.stop:
            ends.append("a string of --stop")
            reason += ' or "stop"'
        at = " or ".join(filter(None, (", ".join(ends[:-1]), ends[-1])))
        so = "" if options.json_schema is None else ", so JSON is incomplete"
        render.note(f"{what} cut at {at}{so}: stop_reason {reason} in results.jsonl")


def dry_run_lines(document: Mapping[str, Any], *, splits: bool) -> Iterator[str]:
    """Output of `--dry-run`: a line per document, then the totals. If it `splits` a document, the number of calls, and
    so of new tokens, is an estimate.
    """
    for row in document["results"]:
        if row["error"]:
            yield f"fail    {_failure(row)}"
        else:
            name, answer = one_line(row["document"]), one_line(row["output"])
            yield f"do      {name}: {render.count(row['prompt_tokens'], 'prompt token')}, to {answer}"
            yield from (f"warning: {name}: {warning}" for warning in row.get("warnings", ()))
    yield (
        f"{render.count(document['documents'], 'document')}: {document['to_do']:,} to do, "
        f"{document['refused']:,} would fail, {document['failed']:,} failed before, {document['skipped']:,} done before"
    )
    shared = f" ({document['shared_tokens']:,} as in other documents)" if document["shared_tokens"] else ""
    prompts = render.count(document["prompt_tokens"], "prompt token")
    bound = "about" if splits else "at most"
    yield f"{prompts}{shared}, {bound} {render.count(document['new_tokens'], 'new token')}"
    fits = "" if document["fits"] else ", which does not fit"
    yield (
        f"{document['device']}: {document['parallel']} at once, {render.count(document['context'], 'token')} each; "
        f"{render.size(document['planned_bytes'])} of {render.size(document['available_bytes'])} memory{fits}"
    )
    predicted = document["predicted_s"]
    if not document["to_do"]:
        return
    if predicted is None:
        yield "no estimate before a first run"
    else:
        basis = (
            "as measured in an earlier run"
            if document["predicted_from"] == "run"
            else "predicted as in `quantspec plan`"
        )
        yield f"about {duration(predicted)}, {basis}"


def duration(seconds: float) -> str:
    """A time for people: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
