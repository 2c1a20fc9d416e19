"""From a document of a batch to its prompt, or the reason why it has none."""

from __future__ import annotations

import hashlib
import sys
import time
from array import array
from functools import cached_property, partial
from typing import TYPE_CHECKING

from . import documents, mapreduce, prompts
from .errors import DoesNotFitError, FileError, InputError, NotFiniteError, QuantspecError
from .model import Written
from .predict import PAGE_TOKENS
from .slots import BeyondMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from .batch import Arguments
    from .batch_work import Job
    from .model import Model, Prompt
    from .options import GenerateOptions

# Characters of documents that are counted together, on all processors: encoding takes over 100 bytes of memory per character.
GROUP_CHARACTERS = 2_000_000

# Bytes of texts that counting keeps for decoding, so that a PDF is not extracted twice. They hold over a hundred books.
KEPT_BYTES = 64 << 20

# Errors of a single document; any other error ends the batch.
OF_DOCUMENT = (InputError, DoesNotFitError, NotFiniteError, FileError)


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
        self._whole_context = context
        self.may_split = arguments.long == "map-reduce"
        self._arguments = arguments
        self._prefixes = Prefixes() if arguments.dry_run else None
        # Extracted documents, by name and hash.
        self._kept: dict[tuple[str, str], prompts.Document] = {}
        self._kept_bytes = 0

    def limit(self, context: int, wanted: int) -> None:
        """Limits the context to what fits into memory, if that is less than wanted."""
        if context < wanted:
            self.context = min(self.context, context)

    def refusal(self, job: Job) -> QuantspecError | None:
        """Why a document that was counted before `limit` cannot be answered after it. Counts the calls of others again."""
        if not self.may_split:
            return self.beyond_memory(job.source.shown, job.tokens)
        try:
            job.calls, job.call_tokens = self._plan(job)
        except DoesNotFitError as error:
            return error
        return None

    def new_tokens(self, prompt_tokens: int) -> int:
        """Most tokens of an answer to a document. Without --long they do not depend on the memory of this machine."""
        return self.options.new_tokens(prompt_tokens, self.context if self.may_split else self._whole_context)

    def shortens(self, prompt_tokens: int) -> bool:
        """True if the context leaves an answer to a document less than the default."""
        return self.new_tokens(prompt_tokens) < self.options.max_new_tokens

    @property
    def part_tokens(self) -> int:
        """Most tokens of an answer that is an input of another call. By default at most a quarter of what the instruction
        leaves of the context, so that two of these answers and their answer fit.
        """
        most = self.options.max_new_tokens
        return max(1, min(most, (self.context - self._empty_tokens) // 4)) if self.options.shortens else most

    @cached_property
    def _empty_tokens(self) -> int:
        """Tokens of the prompt of a text of one character: the instruction and the template."""
        return self.tokens("a text", ".")

    @property
    def budget(self) -> int:
        """Most tokens of a prompt if documents may be split. A document with more is."""
        return self.context - self.part_tokens

    def read(self, job: Job, *, keep: bool = False) -> prompts.Document:
        """The document's text; notes its hash and warnings, and forgets what is known of an earlier content. With `keep`, the
        next call need not extract it again.
        """
        before, job.sha256 = job.sha256, None
        try:
            raw = job.source.read()
            job.sha256 = hashlib.sha256(raw).hexdigest()
        finally:
            if job.sha256 != before:
                job.tokens, job.warnings = None, ()
        if job.source.text is not None:  # only a file has a kind
            return prompts.with_content(job.source.shown, job.source.text)
        document = self._take_kept(job) or prompts.from_bytes(job.source.shown, raw)
        job.warnings = document.warnings
        size = sys.getsizeof(document.text)
        extracted = documents.kind(job.source.shown, raw) is not None
        if keep and extracted and self._kept_bytes + size <= KEPT_BYTES:
            self._kept[job.source.shown, job.sha256] = document
            self._kept_bytes += size
        return document

    def _take_kept(self, job: Job) -> prompts.Document | None:
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
        with self._naming_context():
            return self.model.written(
                text,
                instruction=self._arguments.instruction,
                system_prompt=self._arguments.system_prompt,
                template_args=self._arguments.template_args,
                name=name,
                # A text that may be split is counted at any length. `check` judges memory.
                context=len(text) + 1 if self.may_split else self._whole_context,
            )

    def _naming_context(self) -> AbstractContextManager[None]:
        return self.model.naming_context(self._whole_context, self._arguments.context_from)

    def tokens(self, name: str, text: str) -> int:
        """Tokens of a text's prompt."""
        return len(self.prompt(name, text).ids)

    def beyond_memory(self, name: str, tokens: int | None) -> BeyondMemoryError | None:
        """The error of a document whose prompt has so many tokens, if memory is too small for it."""
        if self.may_split or self.context == self._whole_context or tokens is None:
            return None
        needed = tokens + self.new_tokens(tokens)
        if needed <= self.context:
            return None
        return BeyondMemoryError(
            f"{name} and its answer need {needed} tokens; {self.context} fit into memory",
            "use a machine with more memory, or --long map-reduce",
        )

    def check(self, prompt: Prompt) -> None:
        """Refuses a prompt beyond the context."""
        if (beyond := self.beyond_memory(prompt.name, len(prompt.ids))) is not None:
            raise beyond
        try:
            with self._naming_context():
                self.model.check_fits(prompt, self.new_tokens(len(prompt.ids)), self.context)
        except DoesNotFitError as error:
            error.hint += ", or use --long map-reduce"
            raise

    def _plan(self, job: Job) -> mapreduce.Planned:
        """The calls for a document that may be split. Refuses one that cannot be."""
        name = job.source.shown
        return mapreduce.planned(name, job.tokens or 0, self.budget, partial(self.tokens, name), self.part_tokens)

    def examine(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, QuantspecError | None]]:
        """Counts the documents' tokens, in groups that are encoded on all processors. Yields each document, with an error if
        it is known already that it cannot be answered.
        """
        group: list[tuple[Job, Written | QuantspecError | None]] = []
        characters = 0
        for job in jobs:
            found: Written | QuantspecError | None = None
            started = time.perf_counter()
            try:
                name, text = job.source.shown, self.read(job, keep=not self._arguments.dry_run).text
                if len(text) > mapreduce.COUNTED_CHARACTERS and self.may_split:
                    job.tokens = mapreduce.tokens_of(text, partial(self.tokens, name))
                    job.calls, job.call_tokens = self._plan(job)
                else:
                    found = self._written(name, text)
                    characters += len(text)
            except OF_DOCUMENT as error:
                found = error
                self._take_kept(job)
            job.read_s = time.perf_counter() - started
            group.append((job, found))
            if characters > GROUP_CHARACTERS:
                yield from self._counted(group)
                group, characters = [], 0
        yield from self._counted(group)

    def _counted(
        self, group: Sequence[tuple[Job, Written | QuantspecError | None]]
    ) -> Iterator[tuple[Job, QuantspecError | None]]:
        texts = [(job, found) for job, found in group if isinstance(found, Written)]
        errors = {job: found for job, found in group if isinstance(found, QuantspecError)}
        prompts = self.model.encoded([text for _, text in texts])
        for (job, _), prompt in zip(texts, prompts, strict=True):
            job.tokens = len(prompt.ids)
            try:
                if self.may_split:
                    job.calls, job.call_tokens = self._plan(job)
                else:
                    self.check(prompt)
            except OF_DOCUMENT as error:
                errors[job] = error
                self._take_kept(job)
            else:
                job.shared = self._prefixes.add(prompt.ids) if self._prefixes is not None else 0
        for job, _ in group:
            yield job, errors.get(job)
