"""Progress of a batch on stderr: rows of the running documents on a terminal, otherwise a line per finished document."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from . import render
from .errors import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
        # Tokens of this run's calls that are done, and how many of their answers have which length.
        self._prompt_tokens = self._new_tokens = 0
        self._lengths: Counter[int] = Counter()
        # Once the last answers have begun: when each was first seen, and its tokens then.
        self._seen: dict[RunningCall, tuple[float, int]] = {}

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
        if self._shown and self._live is None:
            render.note(_line(result))

    def called(self, prompt_tokens: int, new_tokens: int) -> None:
        """Records a call that this run has decoded."""
        self._prompt_tokens += prompt_tokens
        self._new_tokens += new_tokens
        self._lengths[new_tokens] += 1

    def show(self, running: Sequence[Job], waiting: Collection[Job], prompt_share: float) -> None:
        """Draws the running documents and the totals. `prompt_share` as in `seconds_left`."""
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
        totals = Text(self.totals(running, waiting, prompt_share), style="dim", no_wrap=False, overflow="fold")
        self._live.update(Group(table, totals), refresh=True)

    def totals(self, running: Sequence[Job], waiting: Collection[Job], prompt_share: float) -> str:
        """The documents so far, the time left, and the rates."""
        elapsed = time.perf_counter() - self._started
        parts = [f"{self._done + self._failed:,} of {render.count(self._documents, 'document')}"]
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        waiting = list(waiting)  # a copy, because workers take from the queue
        # Their numbers of tokens are read once, because the calls go on.
        growing = {
            call: min(call.done, self._longest)
            for job in running
            for call in list(job.running)
            if call.stage == "decoding"
        }
        read = self._prompt_tokens + sum(_reading_tokens(job) for job in running)
        unread: float = sum(job.planned_tokens for job in waiting)
        unread += sum(max(job.planned_tokens - _read_tokens(job), 0) for job in running)
        new = self._new_tokens + sum(growing.values())
        expected = expected_tokens(self._lengths, growing.values(), self._longest)
        # Map-reduce may make more calls than planned.
        calls = sum(max(job.calls, job.known_calls) - job.done_calls for job in running)
        calls += sum(job.calls for job in waiting)
        not_begun = max(calls - len(growing), 0)
        to_come = sum(expected[done] for done in growing.values()) + expected[0] * not_begun
        left = seconds_left(elapsed, prompt_share, read=read, unread=unread, new=new, to_come=to_come)
        slowest = self._last_answers({} if not_begun else growing, elapsed, expected)
        if left is not None and to_come:
            # While most answers that have begun go on, they are expected to be longer than they will be.
            bound = "about" if self._lengths.total() >= len(growing) else "at most"
            parts.append(f"{bound} {duration(max(left, slowest))} left")
        parts.append(f"prompts {render.number(read / elapsed)} and answers {render.rate(new / elapsed)}")
        return ", ".join(parts)

    def _last_answers(self, growing: Mapping[RunningCall, int], elapsed: float, expected: Mapping[int, float]) -> float:
        """Seconds that the slowest of the last answers takes at its own speed: fewer and fewer decode, so the rate of all
        together falls.
        """
        self._seen = {call: self._seen.get(call, (elapsed, done)) for call, done in growing.items()}
        times = [0.0]
        for call, done in growing.items():
            since, before = self._seen[call]
            if done > before:
                times.append(expected[done] * (elapsed - since) / (done - before))
        return max(times)


def seconds_left(
    elapsed: float, prompt_share: float, *, read: float, unread: float, new: float, to_come: float
) -> float | None:
    """The time left, if prompts and answers go on at their rates so far. None before both rates are known.

    Args:
        elapsed: seconds so far.
        prompt_share: share of prompts in the time of the device; the rest is of answers.
        read: tokens of prompts that are processed.
        unread: tokens of the other prompts.
        new: tokens of answers.
        to_come: tokens that the answers are expected to have besides these.
    """
    if new <= 0 or (unread and read <= 0):
        return None
    prompts = prompt_share * unread / read if unread else 0.0
    return elapsed * (prompts + (1 - prompt_share) * to_come / new)


def expected_tokens(ended: Counter[int], growing: Collection[int], most: int) -> dict[int, float]:
    """Tokens that an answer still gets on average, by the number that it has: 0, and those of growing answers.

    The mean of the `ended` lengths is too short at first, because short answers end first. So this is the estimate of Kaplan
    and Meier: of the answers that reached a length, the share that ended there. One more answer counts that gets `most`;
    otherwise none would be expected to get longer than the longest.
    """
    have = Counter(growing)
    found: dict[int, float] = {}
    left, after, reached = 0.0, most, 1
    for length in sorted({*ended, *have}, reverse=True):
        left += after - length
        after, found[length] = length, left
        reached += ended[length] + have[length]
        left *= 1 - ended[length] / reached
    found[0] = left + after
    return found


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


def _reading_tokens(job: Job) -> float:
    """Tokens of the prompts of the document's running calls that are processed."""
    return sum(_share(call) * call.tokens for call in list(job.running))


def _read_tokens(job: Job) -> float:
    """Tokens of the document's prompts that are processed; map-reduce makes several."""
    return job.read_tokens + _reading_tokens(job)


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


def note_of_cuts(answers: Mapping[str, int], options: GenerateOptions) -> None:
    """Notes that the token limit cut some answers, or stop strings some JSON. `answers`: how many, by their limit."""
    if answers:
        count = sum(answers.values())
        what = f"{render.count(count, 'answer')} {'was' if count == 1 else 'were'}"
        by_string = options.json_schema is not None and options.stop
        reason = '"length" or "stop"' if by_string else '"length"'
        render.note(f"{what} cut at {_ends(answers, options)}: stop_reason {reason} in results.jsonl")


def note_of_cut_parts(documents: int, limit: str, options: GenerateOptions) -> None:
    """As `note_of_cuts`, of partial answers of some documents."""
    of = render.count(documents, "document")
    render.note(f'partial answers of {of} were cut at {_ends([limit], options)}: see "tree" in results.jsonl')


def _ends(limits: Iterable[str], options: GenerateOptions) -> str:
    """What ended answers: these limits, and what follows for JSON."""
    ends, so = list(limits), ""
    if options.json_schema is not None:
        so = ", so JSON is incomplete"
        if options.stop:
            ends.append("a string of --stop")
    *others, last = ends
    return (f"{', '.join(others)} or {last}" if others else last) + so


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
