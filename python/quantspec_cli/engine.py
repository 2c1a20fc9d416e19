"""`Engine`: a model on a device, as Python sees it.

engine = Engine.load("path/or/hub-id", context=16_384)
answer = engine.generate(document, max_new_tokens=300)
print(answer.text, engine.statistics()["acceptance_rate"])
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from . import files, hub, loop, settings, template
from .errors import DoesNotFitError, ModelError, UsageError, native_errors
from .options import EngineOptions, GenerateOptions, shown, whole
from .prompts import check_utf8
from .text import Text
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from . import _native

    OnProgress = Callable[[int, int], object]

# Context of `Engine.load` where nobody asks for one: long documents fit, and a laptop holds its cache for most models.
DEFAULT_CONTEXT = 32_768


class Statistics(TypedDict):
    """What an engine did and holds; times in seconds, rates None where nothing was drafted."""

    load_s: float
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    rounds: int
    gamma_mean: float | None
    draft_pages_mean: float | None
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_rate_per_position: list[float] | None
    weights_bytes: int
    draft_weights_bytes: int
    cache_upper_bytes: int
    cache_lower_bytes: int
    cache_full_bytes: int
    buffer_bytes: int
    workspace_bytes: int
    planned_bytes: int
    peak_bytes: int | None


class Arguments(TypedDict, total=False):
    """Keyword arguments of `Engine.stream` and its kin."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: Iterable[str]
    ignore_eos: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids.

    Attributes:
        ids: the tokens, special ones included.
        continues: the answer continues the prompt's text, instead of replying to it.
        name: what to call it in messages.
    """

    ids: list[int]
    continues: bool = True
    name: str = "the prompt"

    def __post_init__(self) -> None:
        """Takes whatever yields ids, a NumPy array for example."""
        ids: Any = self.ids
        try:
            # An array's own list has Python's numbers.
            listed = None if isinstance(ids, str | bytes) else list(ids.tolist() if hasattr(ids, "tolist") else ids)
        except TypeError:
            listed = None
        if listed is None:
            raise UsageError(f"the ids of {self.name} are {shown(ids):.60}", "give a list of token ids")
        object.__setattr__(self, "ids", listed)


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: emitted ids, without the one that ended the text.
        text: the emitted text.
        stop_reason: "length", "eos", "stop" or "interrupted".
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    stop_reason: str


@dataclass(frozen=True)
class Model:
    """A checkpoint with its tokenizer, before any weight is loaded.

    Attributes:
        name: what it was asked for by.
        directory: its files, or the one GGUF file (the first of a split one).
    """

    name: str
    directory: Path
    info: dict[str, Any] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)

    @classmethod
    def open(
        cls, model: str | None = None, *, revision: str | None = None, offline: bool = False, progress: bool = False
    ) -> Model:
        """Finds (or downloads) a model and checks its configuration and tokenizer."""
        from . import _native

        directory = hub.resolve(model, revision=revision, offline=offline, progress=progress)
        if not files.is_file(directory) and not files.is_file(directory / "config.json"):
            raise ModelError(
                f"{directory} has no config.json",
                "give a directory with config, tokenizer and safetensors, or a GGUF file",
            )
        with native_errors():
            info = _native.model_info(str(directory))
        return cls(model or hub.DEMO, directory, info, Tokenizer(directory, info["vocab"]))

    @property
    def context(self) -> int:
        """Longest context of the checkpoint, in tokens."""
        return int(self.info["max_positions"])

    @cached_property
    def eos(self) -> frozenset[int]:
        """Ids that end a text: the checkpoint's, or the tokenizer's where it names none."""
        ids = frozenset(self.info["eos"])
        fallback = self.tokenizer.id_of(self.tokenizer.special.get("eos_token"))
        return ids or (frozenset() if fallback is None else frozenset({fallback}))

    @cached_property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template."""
        return template.find(self.directory, self.tokenizer.config)

    def prompt(
        self,
        document: str,
        *,
        instruction: str | None = None,
        system_prompt: str | None = None,
        name: str = "the prompt",
        context: int | None = None,
    ) -> Prompt:
        """Encodes a document: as it is, or as a conversation when there is an instruction or a system prompt.

        A document that cannot fit the context (by default the model's), whatever its tokens, is refused before the
        long work of encoding it.
        """
        limit = self.context if context is None else context
        _check_text(name, document)
        for what, text in (("the instruction", instruction), ("the system prompt", system_prompt)):
            if text is not None:
                _check_text(what, text)
        # Composing characters may make a text a little shorter before it is split into tokens, never four times.
        if len(document) > 4 * limit and len(document.encode()) > 4 * limit * self.tokenizer.longest_token_bytes:
            raise DoesNotFitError(
                f"{name} has {len(document)} characters, more than {limit} tokens can hold",
                "split the document or choose a model with a longer context",
            )
        if instruction is None and system_prompt is None:
            prompt = Prompt(self.tokenizer.encode(document), name=name)
        elif self.chat_template is None:
            prompt = Prompt(self.tokenizer.encode(template.plain(document, instruction, system_prompt)), name=name)
        else:
            conversation = template.messages(document, instruction, system_prompt)
            text = template.render(self.chat_template, conversation, self.tokenizer.special)
            prompt = Prompt(self.tokenizer.encode(text, special=False), continues=False, name=name)
        return prompt

    def check_fits(self, prompt: Prompt, max_new_tokens: int, context: int) -> int:
        """Tokens the prompt and its answer need; an error with the numbers if that exceeds the context."""
        length, needed = len(prompt.ids), len(prompt.ids) + max_new_tokens
        if needed <= context:
            return needed
        hints = []
        if length < context:
            hints.append(f"ask for at most {context - length} new tokens (-n)")
        if max_new_tokens < context:
            hints.append(f"shorten the prompt to {context - max_new_tokens} tokens")
        if context < self.context:
            hints.append(f"raise the context, up to the model's {self.context}")
        raise DoesNotFitError(
            f"{prompt.name} has {length} tokens and {max_new_tokens} new ones make {needed}; the context is {context}",
            " or ".join(hints) or "choose a model with a longer context",
        )

    def resolve_context(self, wanted: int | None) -> int:
        """A context in tokens: what is asked for (None or 0: the model's), checked against the model's."""
        if not wanted:
            return self.context
        if wanted < 0:
            raise UsageError(
                f"ctx_size is {wanted}",
                "use a positive number of tokens, or 0 for the model's context",
                option="ctx_size",
            )
        if wanted > self.context:
            raise DoesNotFitError(
                f"a context of {wanted} tokens exceeds the model's {self.context}",
                f"use at most {self.context}, or a model with a longer context",
                option="ctx_size",
            )
        return wanted


class Slots:
    """Places for sequences in an engine, which all its streams share."""

    def __init__(self, native: _native.Engine, count: int) -> None:
        """`count` sequences have a place."""
        self.native = native
        # One prefill or round at a time. Reentrant: what a callback of a prefill asks for reaches the engine, which refuses.
        self.turn = threading.RLock()
        self._count = count
        self._taken: set[Text] = set()
        self._kept_tokens = 0
        self._counting = threading.Lock()
        self._process = os.getpid()
        # The thread that is inside a callback of a prefill, and what waits for its end.
        self._called_back: int | None = None
        self._postponed: list[Callable[[], object]] = []

    def check_process(self) -> None:
        """Refuses a fork: the engine's worker threads stayed behind, as does a GPU's context."""
        if os.getpid() != self._process:
            raise UsageError(
                f"the engine belongs to process {self._process}, this is its fork {os.getpid()}",
                'load an engine in every process, or start processes by "spawn"',
            )

    def finish(self, slot: int) -> None:
        """Frees a slot. Those of a fork are its parent's: the engine may be locked there by a thread that stayed behind."""
        if os.getpid() != self._process:
            return
        if self.in_callback:
            self.postpone(lambda: self.native.finish(slot))
        else:
            self.native.finish(slot)

    @property
    def in_callback(self) -> bool:
        """Whether who asks is a callback of a prefill: the engine is at work, and waiting for anybody could be for ever."""
        return self._called_back == threading.get_ident()

    def calling_back(self, on_prefill: OnProgress) -> OnProgress:
        """The callback, known as one while it runs."""

        def call(done: int, total: int) -> None:
            self._called_back = threading.get_ident()
            try:
                on_prefill(done, total)
            finally:
                self._called_back = None

        return call

    def postpone(self, work: Callable[[], object]) -> None:
        """Leaves what a callback may not do to whoever it has interrupted."""
        self._postponed.append(work)

    def catch_up(self) -> None:
        """Does what was postponed, in a thread that holds nothing."""
        # Several threads may be at it: each takes what it finds.
        while not self.in_callback:
            try:
                work = self._postponed.pop(0)
            except IndexError:
                return
            work()

    @property
    def kept_tokens(self) -> int:
        """Tokens of answers behind the first of each: what rounds gave, without what they gave behind the end of a text."""
        return self._kept_tokens

    def keep(self, tokens: int) -> None:
        """Counts tokens of a round that an answer took."""
        with self._counting:
            self._kept_tokens += tokens

    @contextmanager
    def take(self, prompts: Sequence[Prompt], texts: Sequence[Text], options: GenerateOptions) -> Iterator[list[int]]:
        """Slots with these prompts while the body runs; whoever decodes frees a slot when its text ends."""
        slots: list[int] = []
        try:
            with self.turn:
                self._check_room(len(prompts))
                for prompt in prompts:
                    slots.append(self.native.add(prompt.ids, **options.sampling()))
                self._taken.update(texts)
        except BaseException:
            for slot in slots:
                self.finish(slot)
            raise
        try:
            yield slots
        finally:
            self._taken.difference_update(texts)

    def _check_room(self, wanted: int) -> None:
        # A copy: streams of other threads come and go.
        under_way = sum(text.stop_reason is None for text in list(self._taken))
        if wanted + under_way <= self._count:
            return
        free = self._count - under_way
        raise UsageError(
            f"{wanted} sequences are to start and {free} of the engine's {self._count} are free",
            "end a stream with Stream.close(), or load the engine with a larger batch=",
        )


class Batch:
    """Sequences that decode together: an iterator of (index of the prompt, text) as text becomes available.

    The first len(prompts) items come from the prompts, one each and in order; later ones from rounds. A text may be
    empty. Threads may share it: they take turns, and each item is one thread's.

    Attributes:
        texts: the answers as they grow, in the order of the prompts.
    """

    def __init__(
        self,
        slots: Slots,
        model: Model,
        prompts: Sequence[Prompt],
        options: GenerateOptions,
        on_prefill: OnProgress | None = None,
    ) -> None:
        """Prepares the answers; the engine's slots are taken by the first step of the iteration."""
        self._prompts = prompts
        self.texts = [
            Text(
                model.tokenizer.answer_bytes(continues=prompt.continues),
                limit=options.max_new_tokens,
                eos=frozenset[int]() if options.ignore_eos else model.eos,
                stops=options.stop,
            )
            for prompt in prompts
        ]
        # Not a method of this object: dropping the batch then ends its decoding and frees its slots at once.
        self._pieces = _decode(slots, prompts, self.texts, options, on_prefill)
        self._slots = slots
        # Held inside `_pieces`, by that thread.
        self._turn = threading.Lock()
        self._inside: int | None = None
        self._ending = threading.Event()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self

    def __next__(self) -> tuple[int, str]:
        self._slots.check_process()
        if self._is_called_from_inside():
            raise UsageError("a callback of an answer asks for the next piece of one", "ask when the callback is done")
        try:
            with self._turn:
                # Whoever ends the answer may wait for the turn and not get it between two of ours.
                if self._ending.is_set():
                    raise StopIteration
                try:
                    self._inside = threading.get_ident()
                    return next(self._pieces)
                finally:
                    self._inside = None
        finally:
            self._slots.catch_up()

    def _is_called_from_inside(self) -> bool:
        """Whether a callback of a prefill or a handler of a signal asks, which may not wait for what it interrupts."""
        return self._slots.in_callback or self._inside == threading.get_ident()

    def interrupt(self) -> list[tuple[int, str]]:
        """Ends what still grows and frees its slots, from any thread: when the round or prefill under way is done. Returns
        text that was held back, by index.
        """
        self._slots.check_process()
        self._ending.set()
        if self._is_called_from_inside():
            self._slots.postpone(self.interrupt)
            return []
        with self._turn:
            self._pieces.close()
            return [(index, text.interrupt()) for index, text in enumerate(self.texts) if text.stop_reason is None]

    def generations(self) -> list[Generation]:
        """The answers, in the order of the prompts."""
        return [
            Generation(len(prompt.ids), text.tokens, text.text, text.stop_reason or "interrupted")
            for prompt, text in zip(self._prompts, self.texts, strict=True)
        ]


def _decode(
    places: Slots,
    prompts: Sequence[Prompt],
    texts: Sequence[Text],
    options: GenerateOptions,
    on_prefill: OnProgress | None,
) -> Generator[tuple[int, str], None, None]:
    """Takes slots and decodes; yields (index of the prompt, text)."""
    places.check_process()
    with native_errors(), places.take(prompts, texts, options) as slots:
        index = {slot: place for place, slot in enumerate(slots)}
        answers = dict(zip(slots, texts, strict=True))
        called = None if on_prefill is None else places.calling_back(on_prefill)
        # Closed before the places count as free: the engine frees them then.
        rounds = loop.decode(places.native, answers, finish=places.finish, on_prefill=called, turn=places.turn)
        with closing(rounds) as pieces:
            kept = [1] * len(texts)
            for slot, text in pieces:
                tokens = len(texts[index[slot]].tokens)
                places.keep(max(tokens - kept[index[slot]], 0))
                kept[index[slot]] = max(tokens, 1)
                yield index[slot], text
                # A stream of the parent may go on in a fork.
                places.check_process()


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{name} is {shown(text):.60}", "give a text")
    check_utf8(name, text)


def _check_callback(name: str, callback: object) -> None:
    if callback is not None and not callable(callback):
        raise UsageError(f"{name} is {shown(callback):.60}", "give a function of (done, total), or None")


def _check_ids(prompt: Prompt, vocab: int) -> None:
    """Refuses ids the model does not have: the engine takes unsigned numbers only."""
    if not prompt.ids:
        raise UsageError(f"{prompt.name} has 0 tokens", "give at least one token, for example the model's BOS")
    for id in prompt.ids:
        # The first test alone is the fast path of a long prompt.
        if type(id) is not int or not 0 <= id < vocab:
            whole(f"a token id of {prompt.name}", id, 0, vocab - 1)


class Stream:
    """One answer as an iterator of pieces of text. Leaving it early, or `close`, ends the answer and frees its slot.

    Threads may share it: each piece goes to one of them.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        for _, text in self._batch:
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        """Ends the answer here. Any thread may: it waits for a round or prefill under way, and who iterates is done then."""
        self._batch.interrupt()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The answer so far."""
        return self._batch.generations()[0]


class Engine:
    """A model on a device, ready to decode. Use `Engine.load`.

    Threads may share it: streams take turns, round by round.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        *,
        context: int,
        longest_prompt: int | None = None,
        batch: int = 1,
        on_loading: OnProgress | None = None,
    ) -> None:
        """Loads the weights; `context` and `batch` are the longest sequence and the most sequences at once.

        Where the longest prompt is known, less memory is planned for reading it than for one that fills the context.
        """
        from . import _native

        self.model = model
        self.options = options
        self.context = context
        with native_errors():
            self.native = _native.Engine(
                str(model.directory),
                capacity=context,
                prompt_capacity=longest_prompt,
                slots=batch,
                draft_cache=settings.native_draft_cache(),
                on_loading=on_loading,
                **options.native(),
            )
        self._slots = Slots(self.native, batch)

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        context: int | None = None,
        batch: int = 1,
        device: str = "auto",
        threads: int | None = None,
        method: str = "quantspec",
        gamma: int | Literal["auto"] = "auto",
        kv_target: str = "int8",
        kv_rounding: str = "balanced",
        draft_weights: str = "int4",
        draft_pages: int | Literal["all", "auto"] = "all",
        page_choice: str = "best",
        accept: str = "replay",
        on_loading: OnProgress | None = None,
    ) -> Engine:
        """Loads a model.

        Args:
            model: directory, GGUF file or hub id (also "id@revision", "id:Q8_0"); None is the demo model of the package.
            revision: branch, tag or commit on the hub.
            offline: use the download cache only.
            context: most tokens of a sequence, prompt and answer together; None is the model's, at most 32,768.
                Memory is planned for it, and refused with numbers before anything is loaded.
            batch: most sequences that decode together.
            device: "auto", "cpu", "cuda" or "cuda:N".
            threads: CPU workers; None is $QUANTSPEC_THREADS, or all processors.
            method: what drafts: "quantspec" (4-bit cache and weights), "kv4", "w4", or "ar" (nothing).
            gamma: drafted tokens per round, 0 to 16, or "auto".
            kv_target: view of the cache that defines the output: "int8", "fp16" or "int4".
            kv_rounding: "balanced" or "paper".
            draft_weights: "int4", "int4-mlp" or "none".
            draft_pages: pages of 128 tokens a draft reads per KV head, "all", or "auto": as measured cost and acceptance say.
            page_choice: with a number of pages, the "best" ones or the recent ones ("window").
            accept: rule when sampling: "replay" (same text as "ar") or "rejection" (same distribution).
            on_loading: called with (bytes done, bytes in all).

        Raises:
            QuantspecError: one of its subclasses; each has a message and a hint.
        """
        options = EngineOptions(
            device=device,
            threads=settings.threads() if threads is None else threads,
            method=method,
            gamma=gamma,
            kv_target=kv_target,
            kv_rounding=kv_rounding,
            draft_weights=draft_weights,
            draft_pages=draft_pages,
            page_choice=page_choice,
            accept=accept,
        )
        # More sequences than any memory holds; the number reaches the engine as it is.
        whole("batch", batch, 1, 65_536)
        if context is not None:
            whole("context", context, 1, None)
        _check_callback("on_loading", on_loading)
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        if not isinstance(name, str | None):
            raise UsageError(
                f"the model is {shown(model):.60}", "give a directory, a GGUF file or a hub id such as owner/name"
            )
        opened = Model.open(name, revision=revision, offline=offline)
        limit = opened.resolve_context(context) if context is not None else min(opened.context, DEFAULT_CONTEXT)
        return cls(opened, options, context=limit, batch=batch, on_loading=on_loading)

    @property
    def info(self) -> dict[str, Any]:
        """What was loaded, and on what: device, device_name, simd, family, vocab, layers, planned_bytes and more."""
        return self.native.info

    def start(
        self, prompts: Iterable[str | Prompt], options: GenerateOptions, *, on_prefill: OnProgress | None = None
    ) -> Batch:
        """Starts decoding prompts together. Every prompt is checked to fit before the first one is taken."""
        self._slots.check_process()
        _check_callback("on_prefill", on_prefill)
        # Read once: a generator yields its prompts to nobody else.
        given = None if isinstance(prompts, str) or not isinstance(prompts, Iterable) else list(prompts)
        if given is None or not all(isinstance(prompt, str | Prompt) for prompt in given):
            raise UsageError(f"a prompt is {shown(prompts):.60}", "give texts, or what engine.model.prompt returns")
        if not given:
            raise UsageError("no prompt", "give at least one prompt")
        encoded = [
            self.model.prompt(prompt, context=self.context) if isinstance(prompt, str) else prompt for prompt in given
        ]
        for prompt in encoded:
            _check_ids(prompt, self.model.info["vocab"])
            self.model.check_fits(prompt, options.max_new_tokens, self.context)
        return Batch(self._slots, self.model, encoded, options, on_prefill)

    def stream(
        self,
        prompt: str | Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Iterable[str] = (),
        ignore_eos: bool = False,
        on_prefill: OnProgress | None = None,
    ) -> Stream:
        """Decodes one prompt and hands on its text piece by piece: whole characters, nothing after a stop string.

        Args:
            prompt: a text, or `engine.model.prompt(document, instruction=...)` to wrap it by the chat template.
            max_new_tokens: length of the answer at most.
            temperature: 0 is greedy.
            top_k: keep the k likeliest tokens; 0 is off.
            top_p: keep the likeliest tokens of this mass; 1 is off.
            min_p: drop tokens below this share of the likeliest; 0 is off.
            seed: same seed, same text, whatever the method.
            stop: strings that end the text; they are not emitted.
            ignore_eos: go on after an end-of-text token.
            on_prefill: called with (rows done, rows in all) while the prompt is read.
        """
        options = GenerateOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        return Stream(self.start([prompt], options, on_prefill=on_prefill))

    def generate(
        self, prompt: str | Prompt, *, on_prefill: OnProgress | None = None, **options: Unpack[Arguments]
    ) -> Generation:
        """Decodes one prompt to its end. Takes the options of `stream`."""
        return self.generate_batch([prompt], on_prefill=on_prefill, **options)[0]

    def generate_batch(
        self, prompts: Iterable[str | Prompt], *, on_prefill: OnProgress | None = None, **options: Unpack[Arguments]
    ) -> list[Generation]:
        """Decodes up to `batch` prompts together; answers in their order. Takes the options of `stream`."""
        batch = self.start(prompts, GenerateOptions(**options), on_prefill=on_prefill)
        for _ in batch:
            pass
        return batch.generations()

    def statistics(self) -> Statistics:
        """Counters and times since loading, over all sequences."""
        self._slots.check_process()
        with native_errors():
            found = cast("Statistics", self.native.stats())
        # The engine does not know where a text ended inside a round.
        kept, decode_s = self._slots.kept_tokens, found["decode_s"]
        found["decode_tokens_per_s"] = kept / decode_s if found["rounds"] and decode_s > 0 else None
        return found
