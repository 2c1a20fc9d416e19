"""Plan of a batch: which documents are new or changed, their lengths, and the memory they need; `--dry-run`."""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import __version__, batch_view, documents, journal, mapreduce, output, plan, prompts, render, sources
from .errors import EXIT_DONE, DoesNotFitError, FileError, InputError, NotFiniteError, QuantspecError
from .model import Written, planned
from .predict import PAGE_TOKENS
from .slots import Opening, together

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from . import _native
    from .generation import Stream
    from .journal import Answer, Contents, Row
    from .model import Model, Prompt
    from .options import EngineOptions, GenerateOptions
    from .sources import Source

# Characters of documents that are counted together, on all processors: encoding takes over 100 bytes of memory per character.
GROUP_CHARACTERS = 2_000_000

# Bytes of texts that counting keeps for decoding, so that a PDF is not extracted twice. They hold over a hundred books.
KEPT_BYTES = 64 << 20

# Errors of a single document; any other error ends the batch.
OF_DOCUMENT = (InputError, DoesNotFitError, NotFiniteError, FileError)

# Most documents, or parts of one, that decode together with `--parallel auto`, by device. On a GPU 32 sequences, the most
# that are measured, decode 1.2 to 1.4 times the tokens/s of 8 with quantspec (docs/benchmarks.md). On a CPU 8 take 9 % less
# time than 4 for 16 short documents with their prompts, and 16 no less than 8. Memory may allow fewer.
PARALLEL = {"cpu": 8, "cuda": 32}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one `quantspec batch`.

    Attributes:
        paths: directories, files, globs or lists.
        out: folder of the answers.
        suffix: of an answer's file name, after the document's whole name.
        template_args: arguments of the chat template.
        unset: parameters of the command that no flag, variable or setting gave.
        long: treatment of a document beyond the context, "refuse" or "map-reduce".
        parallel: most documents that decode together; None chooses.
        report: file for a page of charts.
        prompt_cache: folder of prompts; None keeps them in memory.
        ray: address of the Ray cluster that decodes, or "auto"; None decodes here.
    """

    model: str | None
    revision: str | None
    offline: bool
    paths: Sequence[str]
    out: str
    suffix: str
    instruction: str | None
    system_prompt: str | None
    template_args: Mapping[str, Any]
    unset: Container[str]
    ctx_size: int
    long: str
    parallel: int | None
    prompt_cache: str | None
    ray: str | None
    resume: bool
    retry_failed: bool
    dry_run: bool
    report: str | None
    as_json: bool
    quiet: bool


@dataclass(eq=False)
class RunningCall:
    """A call of the model that has begun.

    Attributes:
        tokens: of its prompt.
        stage: "waiting", "reading" or "decoding", with progress `done` of `total`.
        stream: the growing answer, so that `_stop` can end it.
    """

    tokens: int
    stage: str = "waiting"
    done: int = 0
    total: int = 0
    stream: Stream | None = field(default=None, repr=False)


@dataclass
class Job:
    """One document to answer.

    Attributes:
        source: the document's source.
        output: its answer's path below the output folder.
        tokens: of its prompt, if known.
        shared: tokens at its prompt's start that an earlier prompt has as well, if this is a dry run.
        calls: of the model, as planned.
        sha256: of its bytes, if known.
        stage: "waiting" or "reading", of the document's bytes.
        running: its calls that have begun.
        known_calls: if it is answered in parts, its calls that have begun or wait for others.
        done_calls: its calls that are done.
        read_tokens: of the prompts of its calls that are done.
        answer_tokens: of the answers of these calls.
    """

    source: Source
    output: str
    tokens: int | None = None
    shared: int = 0
    calls: int = 1
    sha256: str | None = None
    stage: str = "waiting"
    running: list[RunningCall] = field(default_factory=list)
    known_calls: int = 0
    done_calls: int = 0
    read_tokens: int = 0
    answer_tokens: int = 0

    def count(self, prompt_tokens: int, new_tokens: int) -> None:
        """Counts a call that is done."""
        self.done_calls += 1
        self.read_tokens += prompt_tokens
        self.answer_tokens += new_tokens


@dataclass
class Workload:
    """The documents of a run, grouped by what has to be done.

    Attributes:
        moved: places of answers, by name, that the journal last had at the place of another --suffix.
        again: number of documents that are done again.
        edited: documents whose answers were changed after they were written.
        foreign: names of pending documents whose output is a file that the batch did not write; it is not replaced.
    """

    todo: list[Job] = field(default_factory=list)
    skipped: list[Source] = field(default_factory=list)
    failed: list[Source] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    again: int = 0
    edited: list[str] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)


def find_work(
    arguments: Arguments, places: Mapping[Source, str], known: Contents, fingerprints: Fingerprints
) -> Workload:
    """Finds the pending documents: new, changed, or interrupted."""
    workload = Workload()
    with render.progress("looking at documents", shown=not arguments.quiet) as on_progress:
        for number, (source, place) in enumerate(places.items(), 1):
            if on_progress is not None:
                on_progress(number, len(places))
            row, job = known.rows.get(source.name), Job(source, place)
            if row is not None and row.finished and arguments.resume:
                try:
                    job.sha256 = hashlib.sha256(source.read()).hexdigest()
                except QuantspecError:
                    job.sha256 = None  # the read before decoding reports the reason
                same = job.sha256 is not None and row.sha256 == job.sha256
                status = fingerprints.status(row.fingerprint) if same else None
                if status == "done":
                    size = _size(Path(arguments.out) / place)
                    if _in_place(row, place, size, known.earlier.get(place)):
                        workload.skipped.append(source)
                        workload.moved |= {source.name: place} if row.output != place else {}
                        workload.edited += [source.shown] if size != row.size else []
                        continue
                if status == "failed" and not arguments.retry_failed:
                    workload.failed.append(source)
                    continue
                workload.again += row.status == "done"
            workload.todo.append(job)
    return workload


def _in_place(row: Row, place: str, size: int | None, earlier: Answer | None) -> bool:
    """True if the file of this size at a place is the row's answer, perhaps edited. It is not edited if a run with another
    --suffix or other options has been there. `earlier` is the answer that a run with this --suffix put there.
    """
    if size is None or row.output == place:
        return size is not None and (row.size == size or row.status == "done")
    return row.size == size and earlier in (None, (row.sha256, row.fingerprint, size))


def _size(path: Path) -> int | None:
    """Bytes of a file; None if it is missing or unreadable."""
    try:
        return path.stat().st_size
    except OSError:
        return None


class BeyondMemoryError(DoesNotFitError):
    """A document needs more memory than there is here and now: unlike other failures, this one is not remembered."""


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of a run.

    Attributes:
        model: the model's.
        answer: of everything that an answer in one call depends on.
        split: of everything that an answer in several calls depends on.
        failure: of everything that a failure depends on.
    """

    model: str
    answer: str
    split: str
    failure: str

    def status(self, fingerprint: str | None) -> str | None:
        """The status of a result with a fingerprint; None if this run's result may be another one."""
        found: dict[str | None, str] = {self.answer: "done", self.split: "done", self.failure: "failed"}
        return found.get(fingerprint)

    def of(self, result: Mapping[str, Any]) -> str:
        """The fingerprint of a result of this run."""
        if result["status"] != "done":
            return self.failure
        return self.split if "tree" in result else self.answer


class Prefixes:
    """The prompts of a dry run, as hashes of their blocks: a prompt cache processes a common prefix once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, ids: Sequence[int]) -> int:
        """Adds a prompt. Returns the tokens of its longest prefix that an earlier prompt has, in whole blocks; its last
        token is always computed.
        """
        before, shared = b"", 0
        for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
            block = array("I", ids[end - PAGE_TOKENS : end]).tobytes()
            before = hashlib.blake2b(before + block, digest_size=16).digest()
            if before in self._seen and end < len(ids):
                shared = end
            self._seen.add(before)
        return shared


class Reader:
    """Converts documents to prompts, or explains why one cannot be."""

    def __init__(self, model: Model, arguments: Arguments, options: GenerateOptions, context: int) -> None:
        self.model, self.options, self.context = model, options, context
        self.may_split = arguments.long == "map-reduce"
        self._arguments = arguments
        self._prefixes = Prefixes() if arguments.dry_run else None
        # Extracted documents, by name and hash.
        self._kept: dict[tuple[str, str], prompts.Document] = {}
        self._kept_bytes = 0
        # True if memory, not the model, limits the context.
        self._bound_by_memory = False

    def limit(self, context: int, wanted: int) -> None:
        """Limits the context to what fits into memory, if that is less than wanted."""
        self._bound_by_memory = context < wanted
        if self._bound_by_memory:
            self.context = min(self.context, context)

    @property
    def budget(self) -> int:
        """Tokens that a prompt may have."""
        return self.context - self.options.max_new_tokens

    def read(self, job: Job, *, keep: bool = False) -> prompts.Document:
        """The document's text; notes its hash. With `keep`, the next call need not extract it again."""
        raw = job.source.read()
        job.sha256 = hashlib.sha256(raw).hexdigest()
        document = self._forget(job) or prompts.from_bytes(job.source.shown, raw)
        size = sys.getsizeof(document.text)
        extracted = documents.kind(job.source.shown, raw) is not None
        if keep and extracted and self._kept_bytes + size <= KEPT_BYTES:
            self._kept[job.source.shown, job.sha256] = document
            self._kept_bytes += size
        return document

    def _forget(self, job: Job) -> prompts.Document | None:
        """Takes the document that `read` has kept."""
        document = self._kept.pop((job.source.shown, job.sha256 or ""), None)
        if document is not None:
            self._kept_bytes -= sys.getsizeof(document.text)
        return document

    def prompt(self, name: str, text: str) -> Prompt:
        """The prompt of a text.

        Raises:
            DoesNotFitError: its length exceeds any possible tokenisation within the context.
        """
        return self.model.encoded([self._written(name, text)])[0]

    def _written(self, name: str, text: str) -> Written:
        return self.model.written(
            text,
            instruction=self._arguments.instruction,
            system_prompt=self._arguments.system_prompt,
            template_args=self._arguments.template_args,
            name=name,
            # A text that may be split is counted at any length.
            context=len(text) + 1 if self.may_split else self.context,
        )

    def tokens(self, name: str, text: str) -> int:
        """Tokens of a text's prompt."""
        return len(self.prompt(name, text).ids)

    def beyond_memory(self, name: str, tokens: int | None) -> BeyondMemoryError | None:
        """The error of a document whose prompt has so many tokens, if memory is too small for it."""
        if self.may_split or not self._bound_by_memory or tokens is None or tokens <= self.budget:
            return None
        return BeyondMemoryError(
            f"{name} and its answer need {tokens + self.options.max_new_tokens} tokens; {self.context} fit into memory",
            "use a machine with more memory, or --long map-reduce",
        )

    def check(self, prompt: Prompt) -> None:
        """Refuses a prompt beyond the context."""
        if (beyond := self.beyond_memory(prompt.name, len(prompt.ids))) is not None:
            raise beyond
        try:
            self.model.check_fits(prompt, self.options.max_new_tokens, self.context)
        except DoesNotFitError as error:
            error.hint += ", or use --long map-reduce"
            raise

    def _calls(self, job: Job) -> int:
        """Calls for a document that may be split. Refuses one that cannot be."""
        name, new_tokens = job.source.shown, self.options.max_new_tokens
        return mapreduce.calls_of(name, job.tokens or 0, self.budget, partial(self.tokens, name), new_tokens)

    def examine(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, QuantspecError | None]]:
        """Counts the documents' tokens, in groups that are encoded on all processors. Yields each document, with an error if
        it is known already that it cannot be answered.
        """
        group: list[tuple[Job, Written | QuantspecError | None]] = []
        characters = 0
        for job in jobs:
            found: Written | QuantspecError | None = None
            try:
                name, text = job.source.shown, self.read(job, keep=not self._arguments.dry_run).text
                if len(text) > mapreduce.COUNTED_CHARACTERS and self.may_split:
                    job.tokens = mapreduce.tokens_of(text, partial(self.tokens, name))
                    job.calls = self._calls(job)
                else:
                    found = self._written(name, text)
                    characters += len(text)
            except OF_DOCUMENT as error:
                found = error
                self._forget(job)
            group.append((job, found))
            if characters > GROUP_CHARACTERS:
                yield from self._counted(group)
                group, characters = [], 0
        yield from self._counted(group)

    def _counted(
        self, group: Sequence[tuple[Job, Written | QuantspecError | None]]
    ) -> Iterator[tuple[Job, QuantspecError | None]]:
        texts = [(job, found) for job, found in group if isinstance(found, Written)]
        errors = {id(job): found for job, found in group if isinstance(found, QuantspecError)}
        prompts = self.model.encoded([text for _, text in texts])
        for (job, _), prompt in zip(texts, prompts, strict=True):
            job.tokens = len(prompt.ids)
            try:
                if self.may_split:
                    job.calls = self._calls(job)
                else:
                    self.check(prompt)
            except OF_DOCUMENT as error:
                errors[id(job)] = error
                self._forget(job)
            else:
                job.shared = self._prefixes.add(prompt.ids) if self._prefixes is not None else 0
        for job, _ in group:
            yield job, errors.get(id(job))


def examined(
    arguments: Arguments, workload: Workload, reader: Reader, opening: Opening | None
) -> Iterator[tuple[Job, QuantspecError | None]]:
    """The pending documents with their token counts, or with an error. Ends early if the device cannot be opened."""
    known: list[Job] = []
    for job in workload.todo:
        if job.source.name in workload.foreign:
            yield job, journal.not_own(Path(arguments.out), job.output)
        else:
            known.append(job)
    for found in reader.examine(known):
        if opening is not None:
            opening.check()
        yield found


def longest(reader: Reader, todo: Sequence[Job]) -> int:
    """Tokens of the longest sequence to decode."""
    lengths = [job.tokens + reader.options.max_new_tokens for job in todo if job.tokens is not None]
    too_long = any(length > reader.context for length in lengths)
    fitting = [length for length in lengths if length <= reader.context]
    return reader.context if too_long and reader.may_split else max(fitting, default=reader.options.max_new_tokens + 1)


class Room(NamedTuple):
    """Size of a batch's engine.

    Attributes:
        context: tokens of the longest sequence.
        parallel: concurrent sequences.
        pool: tokens of all sequences together: prompts and answers, in whole pages.
        wanted: tokens of the longest sequence that was requested.
    """

    context: int
    parallel: int
    pool: int
    wanted: int


def room(
    arguments: Arguments,
    engine_options: EngineOptions,
    reader: Reader,
    todo: Sequence[Job],
    opened: _native.OpenDevice,
) -> Room:
    """The number of concurrent sequences that memory holds on average, as they share its pages."""
    wanted = longest(reader, todo)
    plan_of = partial(planned, reader.model, engine_options, opened=opened)
    alone = plan_of(context=wanted)
    context = wanted if alone["fits"] else min(wanted, alone["longest_context"])
    most = arguments.parallel or PARALLEL[alone["device"].partition(":")[0]]
    context = max(context, 1)
    new_tokens = reader.options.max_new_tokens
    lengths = [(job.tokens or context) + new_tokens for job in todo]
    # A document beyond the context is refused, or split into parts that decode together.
    lengths = [
        min(length, context)
        for length in lengths
        if length <= context or reader.may_split
        for _ in range(min(-(-(length - new_tokens) // max(context - new_tokens, 1)), most))
    ]
    return Room(context, *together(plan_of, context, lengths or [context], most), wanted)


def _counted(
    arguments: Arguments, workload: Workload, reader: Reader, opening: Opening
) -> tuple[list[dict[str, Any]], list[Job]]:
    """A row of `--dry-run` for each pending document, and the documents that can be decoded."""
    rows: list[dict[str, Any]] = []
    ready: list[Job] = []
    with render.progress("counting tokens", shown=not arguments.quiet) as on_progress:
        for number, (job, error) in enumerate(examined(arguments, workload, reader, opening), 1):
            ready += [job] if error is None else []
            rows.append(
                {
                    "document": job.source.shown,
                    "output": sources.shown(job.output),
                    "prompt_tokens": job.tokens,
                    "shared_tokens": job.shared,
                    "new_tokens": reader.options.max_new_tokens * job.calls,
                    "error": error and error.to_json()["error"],
                }
            )
            if on_progress is not None:
                on_progress(number, len(workload.todo))
    return rows, ready


def dry_run(
    arguments: Arguments,
    engine_options: EngineOptions,
    workload: Workload,
    reader: Reader,
    rates: Mapping[str, Mapping[str, float]],
) -> output.Done:
    """Prints the plan and writes nothing. The time follows from the rates of earlier runs into this folder, or from
    `quantspec plan`.
    """
    opening = Opening(reader.model, engine_options)
    rows, ready = _counted(arguments, workload, reader, opening)
    opened = opening.take()
    context, parallel, pool, wanted = room(arguments, engine_options, reader, ready, opened)
    held = planned(reader.model, engine_options, context=context, batch=parallel, pool=pool, opened=opened)
    reader.limit(context, wanted)
    for row in rows:
        if row["error"] is None and (error := reader.beyond_memory(row["document"], row["prompt_tokens"])) is not None:
            row["error"] = error.to_json()["error"]
    possible = [row for row in rows if row["error"] is None]
    document = {
        "quantspec": __version__,
        "model": reader.model.name,
        "documents": len(workload.todo) + len(workload.skipped) + len(workload.failed),
        "to_do": len(possible),
        "refused": len(rows) - len(possible),
        "failed": len(workload.failed),
        "skipped": len(workload.skipped),
        "prompt_tokens": sum(row["prompt_tokens"] for row in possible),
        "shared_tokens": sum(row["shared_tokens"] for row in possible),
        "new_tokens": sum(row["new_tokens"] for row in possible),
        "context": context,
        "parallel": parallel,
        "pool": pool,
        **held,
        "predicted_s": None,
        "predicted_from": None,
        "results": rows,
    }
    measured = rates.get(held["device"])
    if possible and (found := measured or _predicted_rates(reader.model, engine_options, document)) is not None:
        document["predicted_from"] = "run" if measured else "plan"
        processed = document["prompt_tokens"] - document["shared_tokens"]
        document["predicted_s"] = (
            processed / found["prefill_tokens_per_s"] + document["new_tokens"] / found["decode_tokens_per_s"]
        )
    if arguments.as_json:
        return output.Done(EXIT_DONE, document)
    stdout = output.Stdout()
    for line in batch_view.dry_run_lines(document, splits=any(job.calls > 1 for job in ready)):
        stdout.write(line + "\n")
    return output.Done(EXIT_DONE)


def _predicted_rates(model: Model, options: EngineOptions, document: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Rates that `quantspec plan` predicts for documents of average length; None if it cannot. A method that it does not
    predict counts as plain decoding.
    """
    # A document beyond the context is split.
    size = max(1, min((document["prompt_tokens"] + document["new_tokens"]) // document["to_do"], document["context"]))
    arguments = plan.Arguments(
        model=str(model.directory),
        revision=None,
        offline=True,
        ctx_size=size,
        batch=max(1, min(document["parallel"], document["pool"] // size)),
        acceptance=None,
        as_json=True,
    )
    found = plan.examine(arguments, options)
    predicted = found["predicted"]
    if predicted is None or predicted["prefill_tokens_per_s"] is None:
        return None
    return {
        "prefill_tokens_per_s": predicted["prefill_tokens_per_s"],
        "decode_tokens_per_s": _decode_rate(found["methods"], options),
    }


def _decode_rate(rows: Sequence[Mapping[str, Any]], options: EngineOptions) -> float:
    """Predicted tokens/s of the options' method, or of plain decoding if the method is not predicted. With `--draft-pages
    auto` they are those of its fastest row. Otherwise the row has at least the draft's pages, and as few more as possible.
    """

    def predicted(method: str) -> dict[float, float]:
        """Rates by pages; all pages are infinitely many."""
        return {
            inf if row["draft_pages"] == "all" else row["draft_pages"]: row["decode_tokens_per_s"]
            for row in rows
            if row["method"] == method and row["decode_tokens_per_s"]
        }

    rates = predicted(options.method) or predicted("ar")
    pages = options.pages_of_draft
    if pages == "auto":
        return max(rates.values())
    least = inf if pages == "all" else pages
    return rates[min((number for number in rates if number >= least), default=max(rates))]
