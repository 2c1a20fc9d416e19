"""`Engine`: a model on a device, as Python sees it.

engine = Engine.load("path/or/hub-id", context=16_384)
answer = engine.generate(document, max_new_tokens=300)
print(answer.text, engine.statistics()["acceptance_rate"])
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, cast, overload

from . import schema, settings
from .errors import QuantspecError, UsageError, native_errors
from .generation import Batch, Generation, Stream
from .model import Model, Prompt
from .options import EngineOptions, GenerateOptions, as_list, boolean, shown, whole
from .prompts import check_utf8
from .scheduler import Lease, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    OnProgress = Callable[[int, int], object]

# Default context of `Engine.load`: enough for long documents, with a cache that fits on a laptop for most models.
DEFAULT_CONTEXT = 32_768


class MethodStatistics(TypedDict):
    """Counters of one method, if several are chosen from; rates None if it drafted nothing."""

    rounds: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    draft_pages_mean: float | None


class _OfMethods(TypedDict, total=False):
    by_method: dict[str, MethodStatistics]


class Statistics(_OfMethods):
    """Counters, times and bytes of an engine; times in seconds, rates None if nothing was drafted."""

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
    copied_tokens: int
    guessed_tokens: int
    right_guesses: int
    accepted_tokens: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_rate_per_position: list[float] | None
    reused_tokens: int
    reserved_pages: int
    pool_waste: float | None
    weights_bytes: int
    draft_weights_bytes: int
    cache_upper_bytes: int
    cache_lower_bytes: int
    cache_full_bytes: int
    buffer_bytes: int
    workspace_bytes: int
    host_bytes: int
    prompt_cache_bytes: int
    planned_bytes: int
    peak_bytes: int | None
    batch_mean: float | None
    batch_peak: int
    engine_s: float
    longest_chunk_s: float


class Arguments(TypedDict, total=False):
    """Keyword arguments of `Engine.stream` and similar methods."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram: int
    seed: int
    stop: str | Iterable[str]
    ignore_eos: bool
    logprobs: int | None
    json_schema: Mapping[str, Any] | str | None


def check_folder(folder: object) -> None:
    """Refuses values that are not a path for a folder of prompts."""
    if not isinstance(folder, str) or not folder or "\0" in folder:
        raise UsageError(f"prompt_cache is {shown(folder):.60}", "name a folder", option="prompt_cache")
    check_utf8("the name of the prompt cache", folder)


def _model_name(what: str, model: object) -> str | None:
    """The name of a model as text."""
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(name, str | None):
        raise UsageError(
            f"{what} is {shown(model):.60}", "give a directory, a GGUF file or a hub id such as owner/name"
        )
    return name


def _check_callback(name: str, callback: object) -> None:
    if callback is not None and not callable(callback):
        raise UsageError(f"{name} is {shown(callback):.60}", "give a function of (done, total), or None")


def _checked_options(method: str, options: Arguments) -> GenerateOptions:
    """The options of a method of `Engine`. Python itself would name the constructor in the error of an unknown keyword."""
    for name in options:
        if name not in Arguments.__annotations__:
            raise TypeError(f"Engine.{method}() got an unexpected keyword argument {name!r}")
    return GenerateOptions(**options)


def _check_ids(prompt: Prompt, vocab: int) -> None:
    """Refuses ids outside the model's vocabulary: the engine takes unsigned numbers only."""
    if not prompt.ids:
        raise UsageError(f"{prompt.name} has 0 tokens", "give at least one token, for example the model's BOS")
    for id in prompt.ids:
        # The first test alone is the fast path for long prompts.
        if type(id) is not int or not 0 <= id < vocab:
            whole(f"a token id of {prompt.name}", id, 0, vocab - 1)


class Engine:
    """A model on a device, ready to decode. Use `Engine.load`.

    Threads may share it: all streams decode together, round by round.

    Attributes:
        model: the checkpoint with its tokenizer; `model.prompt` makes prompts.
        options: what the engine was loaded with.
        context: most tokens of a sequence, prompt and answer together.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        *,
        context: int,
        longest_prompt: int | None = None,
        batch: int = 1,
        pool: int | None = None,
        prompt_cache: str | bool = False,
        on_loading: OnProgress | None = None,
    ) -> None:
        """Loads the weights. `context` is the most tokens of a sequence, `batch` the most concurrent sequences.

        With `longest_prompt`, in tokens, less memory is planned for prefill than for a prompt that fills the context. `pool`
        is the number of tokens that all sequences share; None gives each sequence the longest context. `prompt_cache` as
        in `load`.
        """
        from . import _native

        self.model = model
        self.options = options
        self.context = context
        draft_model = model.draft_model(options.draft_model, progress=on_loading is not None)
        with native_errors():
            self.native = _native.Engine(
                str(model.directory),
                capacity=context,
                prompt_capacity=longest_prompt,
                slots=batch,
                draft_model=draft_model,
                pool_tokens=pool,
                draft_cache=settings.native_draft_cache(),
                prompt_memory=prompt_cache is True,
                prompt_folder=str(Path(prompt_cache).absolute()) if isinstance(prompt_cache, str) else None,
                on_loading=on_loading,
                **options.native(),
            )
        self._info = self.native.info
        self._lease = Lease(Scheduler(self.native, batch))

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
        weights: str = "checkpoint",
        kv_target: str = "int8",
        kv_rounding: str = "balanced",
        draft_weights: str = "int4",
        draft_precision: str = "auto",
        draft_pages: int | Literal["all", "auto"] | None = None,
        page_choice: str | None = None,
        draft_refresh: int = 0,
        draft_model: str | os.PathLike[str] | None = None,
        draft_model_kv: str | None = None,
        accept: str = "replay",
        prompt_cache: str | os.PathLike[str] | bool = True,
        on_loading: OnProgress | None = None,
    ) -> Engine:
        """Loads a model.

        Args:
            model: directory, GGUF file or hub id (also "id@revision", "id:Q8_0"); None is the demo model of the package.
            revision: branch, tag or commit on the hub.
            offline: use the download cache only.
            context: most tokens of a sequence, prompt and answer together; None is the model's, at most 32,768.
                Too large a context is refused, with numbers, before anything is loaded.
            batch: most sequences that decode together; others wait.
            device: "auto", "cpu", "cuda" or "cuda:N".
            threads: CPU workers; None is $QUANTSPEC_THREADS, or all processors.
            method: what drafts: "quantspec" (4-bit weights over the 4-bit view of the cache), "auto" (the fastest of several,
                as measured), "ar" (no drafts), or another name of `quantspec run --help` and docs/decoding.md. Settings that
                a method does not support are refused.
            gamma: drafted tokens per round, 0 to 16, or "auto".
            weights: the target's weights, which define the output together with `kv_target`: "checkpoint", "int8" (half the
                memory; drafts read the upper nibbles), "int4" (of most matrices the upper nibbles alone), or "auto" (int8 if
                the checkpoint's do not fit; `info` reports the choice).
            kv_target: view of the cache that defines the output: "int8", "fp16" or "int4".
            kv_rounding: "balanced" or "paper".
            draft_weights: "int4", "int4-mlp" or "none".
            draft_precision: matrices that a draft reads in 8 bits, a comma list of "qkv", "o", "gate-up" and "down"; "none";
                or "auto": on a CPU "down" if that adds at most 5 % to a draft step's bytes (`info` reports the choice).
            draft_pages: pages of 128 tokens a draft reads per KV head, "all", or "auto" (by measured cost and acceptance).
                None is the method's default.
            page_choice: with a number of pages, the "best" ones (the default), or a "window": the first and the newest.
            draft_refresh: with method "snapkv", number of new pages after which it chooses among all pages again; 0 is never.
            draft_model: with methods "draft-model" and "auto", a directory, a GGUF file or a hub id with the same tokenizer.
            draft_model_kv: view of the draft model's own cache: "int8", "fp16" or "int4"; None is `kv_target`.
            accept: rule when sampling: "replay" (same text as "ar") or "rejection" (same distribution).
            prompt_cache: where processed prompts are kept, so that a common prefix is processed once. True: in memory. They
                take at most an eighth of what the engine leaves free, or half of it on a GPU. A folder: on disk, also for
                other processes. False: nowhere. No token depends on it.
            on_loading: called with (bytes done, total bytes).

        Raises:
            QuantspecError: one of its subclasses; each has a message and a hint.
        """
        options = EngineOptions(
            device=device,
            threads=settings.threads() if threads is None else threads,
            method=method,
            gamma=gamma,
            weights=weights,
            kv_target=kv_target,
            kv_rounding=kv_rounding,
            draft_weights=draft_weights,
            draft_precision=draft_precision,
            draft_pages=draft_pages,
            page_choice=page_choice,
            draft_refresh=draft_refresh,
            draft_model=_model_name("the draft model", draft_model),
            draft_model_kv=draft_model_kv,
            accept=accept,
        )
        # More sequences than any memory holds, and small enough for the engine's integers.
        batch = whole("batch", batch, 1, 65_536)
        if context is not None:
            context = whole("context", context, 1, None)
        boolean("offline", offline)
        _check_callback("on_loading", on_loading)
        folder = os.fspath(prompt_cache) if isinstance(prompt_cache, os.PathLike) else prompt_cache
        if not isinstance(folder, bool):
            check_folder(folder)
            folder = settings.expanded(folder)
        opened = Model.open(_model_name("the model", model), revision=revision, offline=offline)
        limit = opened.resolve_context(context) if context is not None else min(opened.context, DEFAULT_CONTEXT)
        return cls(opened, options, context=limit, batch=batch, prompt_cache=folder, on_loading=on_loading)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("an engine cannot be pickled or copied", "load an engine in every process")

    def close(self) -> None:
        """Ends running sequences and frees the memory, from any thread but a callback's. Closing twice has no effect."""
        self._lease.scheduler.stop()
        self.__dict__.pop("native", None)

    @property
    def info(self) -> dict[str, Any]:
        """The loaded model and its device: device, device_name, simd, family, vocab, layers, planned_bytes and more."""
        return dict(self._info)

    @property
    def prompt_share(self) -> float:
        """The share of prompts in the engine's time so far, 0 before any. Does not wait for a round, as `statistics` does."""
        scheduler = self._lease.scheduler
        return scheduler.prompt_s / scheduler.engine_s if scheduler.engine_s else 0.0

    def start(
        self, prompts: Iterable[str | Prompt], options: GenerateOptions, *, on_prefill: OnProgress | None = None
    ) -> Batch:
        """Starts decoding prompts, as many at once as there are slots. All prompts are checked before any is added."""
        encoded = [self._encoded(name, prompt, options) for name, prompt in self._named(prompts, on_prefill)]
        return Batch(self._lease, self.model, encoded, options, on_prefill, context=self.context)

    def _named(
        self, prompts: Iterable[str | Prompt], on_prefill: OnProgress | None
    ) -> Iterable[tuple[str, str | Prompt]]:
        """The prompts of a call, whose types are checked, with their names in messages."""
        self._lease.scheduler.check()
        _check_callback("on_prefill", on_prefill)
        given = as_list(prompts)
        if given is None:
            raise UsageError(f"prompts is {shown(prompts):.60}", "give a list; generate and stream take one prompt")
        for prompt in given:
            if not isinstance(prompt, str | Prompt):
                raise UsageError(
                    f"a prompt is {shown(prompt):.60}",
                    "give a text, engine.model.prompt(...) or Prompt(ids); generate_batch takes several",
                )
        if not given:
            raise UsageError("no prompt", "give at least one prompt")
        names = ["the prompt"] if len(given) == 1 else [f"prompts[{index}]" for index in range(len(given))]
        return zip(names, given, strict=True)

    def _encoded(self, name: str, given: str | Prompt, options: GenerateOptions) -> Prompt:
        """The prompt as token ids. Raises the error of one that cannot be answered."""
        if isinstance(given, str):
            prompt = self.model.prompt(given, name=name, context=self.context)
        else:
            prompt = replace(given, name=name) if given.name == Prompt.name else given
        _check_ids(prompt, self.model.info["vocab"])
        self.model.check_fits(prompt, options.new_tokens(len(prompt.ids), self.context), self.context)
        if options.json_schema is not None:
            schema.check_prompt(prompt)
        return prompt

    def stream(
        self,
        prompt: str | Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        no_repeat_ngram: int = 0,
        seed: int = 0,
        stop: str | Iterable[str] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        json_schema: Mapping[str, Any] | str | None = None,
        on_prefill: OnProgress | None = None,
    ) -> Stream:
        """Decodes one prompt and yields its text piece by piece: whole characters, nothing after a stop string.

        Args:
            prompt: a text, or `engine.model.prompt(document, instruction=...)` to apply the chat template.
            max_new_tokens: most tokens of the answer, at least 1.
            temperature: 0 is greedy; at most 100.
            top_k: keep the k most likely tokens; 0 is off.
            top_p: keep the most likely tokens with this total probability; 1 is off.
            min_p: drop tokens below this share of the highest probability; 0 is off.
            repetition_penalty: divides positive logits of tokens of prompt and answer, multiplies the others; 0.01 to 100, 1
                is off.
            frequency_penalty: subtracted from a token's logit once per occurrence in the answer; -2 to 2, 0 is off.
            presence_penalty: subtracted once from the logit of each token in the answer; -2 to 2, 0 is off.
            no_repeat_ngram: length of the n-grams that may not repeat in prompt and answer, 2 to 100; 0 is off.
            seed: same seed, same text, whatever the method. With the engine's `accept="rejection"` only if gamma, pages and
                method are fixed.
            stop: a string, or several, that end the text; they are not emitted.
            ignore_eos: continue after an end-of-text token.
            logprobs: return log-probabilities of each emitted token, and of this many most likely tokens at its position,
                0 to 20; None returns none.
            json_schema: a JSON schema, or its text: the answer is JSON that it allows, unless max_new_tokens or a stop
                string cut it. Needs the package llguidance, `pip install "quantspec[schema]"`.
            on_prefill: called with (rows done, total rows) during prefill; a row is a token in a layer.

        Raises:
            QuantspecError: a value is wrong, or the prompt cannot be read or does not fit; from the iterator, the engine
                failed or was closed.
        """
        options = GenerateOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            no_repeat_ngram=no_repeat_ngram,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            json_schema=json_schema,
        )
        return Stream(self.start([prompt], options, on_prefill=on_prefill))

    def generate(
        self, prompt: str | Prompt, *, on_prefill: OnProgress | None = None, **options: Unpack[Arguments]
    ) -> Generation:
        """Decodes one prompt to its end. Takes the options of `stream`, and raises its errors."""
        return self.start([prompt], _checked_options("generate", options), on_prefill=on_prefill).finished()[0]

    @overload
    def generate_batch(
        self,
        prompts: Iterable[str | Prompt],
        *,
        return_exceptions: Literal[False] = False,
        on_prefill: OnProgress | None = None,
        **options: Unpack[Arguments],
    ) -> list[Generation]: ...

    @overload
    def generate_batch(
        self,
        prompts: Iterable[str | Prompt],
        *,
        return_exceptions: Literal[True],
        on_prefill: OnProgress | None = None,
        **options: Unpack[Arguments],
    ) -> list[Generation | QuantspecError]: ...

    def generate_batch(
        self,
        prompts: Iterable[str | Prompt],
        *,
        return_exceptions: bool = False,
        on_prefill: OnProgress | None = None,
        **options: Unpack[Arguments],
    ) -> Sequence[Generation | QuantspecError]:
        """Decodes any number of prompts, `batch` (of `load`) at a time; answers in their order. Takes the options of
        `stream`.

        The error of one prompt ends all answers and is raised. With `return_exceptions`, as in `asyncio.gather`, the error
        takes the place of that prompt's answer, and the other answers are finished.
        """
        checked = _checked_options("generate_batch", options)
        boolean("return_exceptions", return_exceptions)
        if not return_exceptions:
            return self.start(prompts, checked, on_prefill=on_prefill).finished()
        encoded: list[Prompt | QuantspecError] = []
        for name, prompt in self._named(prompts, on_prefill):
            try:
                encoded.append(self._encoded(name, prompt, checked))
            except QuantspecError as error:
                encoded.append(error)
        possible = [prompt for prompt in encoded if isinstance(prompt, Prompt)]
        batch = Batch(self._lease, self.model, possible, checked, on_prefill, context=self.context, keeps_failures=True)
        answers = iter([batch.failures.get(index, answer) for index, answer in enumerate(batch.finished())])
        return [next(answers) if isinstance(one, Prompt) else one for one in encoded]

    def prompt_cache_note(self) -> str | None:
        """One line about a problem with the prompt cache after the last call: damage, or an unusable folder."""

        def note() -> str | None:
            with native_errors():
                return self.native.prompt_note()

        return self._lease.scheduler.call(note)

    def score(self, text: str | Prompt) -> NDArray[np.float64]:
        """Log-probabilities of a text's tokens from the second on, each given those before it: float64 [tokens - 1], in
        nats.

        The text is teacher-forced through the cache as in `quantspec eval`, under the target's view (`kv_target`), with
        any method. It waits for a free slot, and other sequences wait until it is done.

        Raises:
            QuantspecError: the text has fewer than 2 tokens, or more than the context; or the engine failed.
        """
        import numpy as np

        if not isinstance(text, str | Prompt):
            raise UsageError(f"the text is {shown(text):.60}", "give a text, or what engine.model.prompt returns")
        prompt = self.model.prompt(text, name="the text", context=self.context) if isinstance(text, str) else text
        _check_ids(prompt, self.model.info["vocab"])
        if len(prompt.ids) == 1:
            raise UsageError(
                f"{prompt.name} has 1 token, and the first token of a text has no log-probability",
                "give a text of at least 2 tokens",
            )

        return np.array(self._lease.scheduler.score(prompt.ids))

    def statistics(self) -> Statistics:
        """Counters and times after loading, over all sequences."""
        return self._lease.scheduler.call(self._statistics)

    def _statistics(self) -> Statistics:
        scheduler = self._lease.scheduler
        with native_errors():
            found = cast("Statistics", self.native.stats())
        # The engine does not know where a text ended inside a round.
        kept, decode_s = scheduler.kept_tokens, found["decode_s"]
        found["decode_tokens_per_s"] = kept / decode_s if found["rounds"] and decode_s > 0 else None
        found["batch_mean"] = scheduler.sequence_rounds / scheduler.rounds if scheduler.rounds else None
        found["batch_peak"] = scheduler.most_sequences
        found["engine_s"] = scheduler.engine_s
        found["longest_chunk_s"] = scheduler.longest_chunk_s
        return found
