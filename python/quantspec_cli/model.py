"""A checkpoint with its tokenizer, and prompts for it, before any weight is loaded."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from . import conversation, files, gguf, hub, schema, template
from .errors import DoesNotFitError, ModelError, UsageError, native_errors
from .instruct import Recommended
from .options import boolean, schema_text, shown, whole
from .prompts import check_instruction, check_text
from .signals import SIGNALS
from .text import Thinking
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from . import _native
    from .options import EngineOptions

# A document of this size is encoded in 0.1 s and 15 MB, so the error that it does not fit can state its exact length.
CHEAP_CHARACTERS = 100_000


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids.

    Attributes:
        ids: the tokens, including special ones.
        continues: the answer continues the prompt's text instead of replying to it.
        name: its name in messages.
        thinking: how a reply marks the model's thinking; None if the model has no thinking blocks.
    """

    ids: list[int]
    continues: bool = True
    name: str = "the prompt"
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        """Accepts any iterable of ids, for example a NumPy array."""
        ids: Any = self.ids
        try:
            # An array's `tolist` yields Python integers.
            listed = None if isinstance(ids, str | bytes) else list(ids.tolist() if hasattr(ids, "tolist") else ids)
        except TypeError:
            listed = None
        if listed is None:
            raise UsageError(f"the ids of {self.name} are {shown(ids):.60}", "give a list of token ids")
        object.__setattr__(self, "ids", listed)
        boolean("continues", self.continues)
        if not isinstance(self.thinking, Thinking | None):
            raise UsageError(
                f"the thinking of {self.name} is {shown(self.thinking):.60}",
                "take the prompt from Model.prompt, or leave it out",
            )


@dataclass(frozen=True)
class Written:
    """A prompt as text, in the model's format.

    Attributes:
        parts: what is encoded, each as text that follows the one before; if it continues, the tokenizer adds its BOS to its
            only part.
        continues, name, thinking: as in `Prompt`.
    """

    parts: Sequence[str]
    continues: bool = True
    name: str = "the prompt"
    thinking: Thinking | None = None


@dataclass(frozen=True)
class Model:
    """A checkpoint with its tokenizer, before any weight is loaded.

    Attributes:
        name: the name it was requested by.
        directory: absolute path of its files, or of the one GGUF file (the first of a split one).
        info: its configuration, as `_native.model_info` returns it.
        tokenizer: text to ids, and ids to bytes.
        offline: a draft model is looked up in the download cache only.
    """

    name: str
    directory: Path
    info: dict[str, Any] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    offline: bool = False
    _draft_models: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _grammars: dict[str, schema.Grammar] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        progress: bool = False,
        draft_model: str | None = None,
    ) -> Model:
        """Finds (or downloads) a model and checks its configuration and tokenizer, and those of its draft model.

        The command line names the draft model here, because Ctrl-C ends it without results while a tokenizer is parsed.
        """
        from . import _native

        directory = hub.resolve(model, revision=revision, offline=offline, progress=progress)
        if not files.is_file(directory) and not files.is_file(config := directory / "config.json"):
            raise ModelError(
                f"{directory} has no config.json" if files.status(config) is None else f"{config} is not a file",
                "give a directory with config, tokenizer and safetensors, or a GGUF file",
            )
        with native_errors():
            info = _native.model_info(str(directory))
        with SIGNALS.ending():
            tokenizer = Tokenizer(directory, info["vocab"])
        # Some files are read later, when the program may be in another folder.
        opened = cls(model or hub.DEMO, directory.absolute(), info, tokenizer, offline)
        opened.draft_model(draft_model, progress=progress)
        return opened

    def draft_model(self, name: str | None, *, progress: bool = False) -> str | None:
        """Path of the checkpoint that drafts for this one, None if none is given. Refuses one with another tokenizer."""
        if name is None or name in self._draft_models:
            return name and self._draft_models[name]
        draft = Model.open(name, offline=self.offline, progress=progress)
        with SIGNALS.ending():
            difference = self.tokenizer.difference(draft.tokenizer)
        if difference is not None:
            raise ModelError(
                f"the draft model {draft.name} has another tokenizer than {self.name}: {difference}",
                "use a smaller model of the same family, with the same tokenizer",
            )
        self._draft_models[name] = str(draft.directory)
        return self._draft_models[name]

    @property
    def context(self) -> int:
        """Longest context of the checkpoint, in tokens."""
        return int(self.info["max_positions"])

    @cached_property
    def eos(self) -> frozenset[int]:
        """Ids that end a text: the checkpoint's and the tokenizer's; in a GGUF file also tokens known by their text."""
        # Fine-tuned models often have a new EOS in the tokenizer alone. vLLM ends texts at both, too.
        names = [self.tokenizer.special.get("eos_token"), *(gguf.ENDS if files.is_file(self.directory) else ())]
        return frozenset(self.info["eos"]) | {id for name in names if (id := self.tokenizer.id_of(name)) is not None}

    @cached_property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template."""
        return template.find(self.directory, self.tokenizer.config)

    @cached_property
    def recommended(self) -> Recommended:
        """What the checkpoint's generation_config.json recommends."""
        return Recommended.read(self.directory)

    @cached_property
    def _vocabulary(self) -> schema.Vocabulary:
        return schema.Vocabulary(self)

    def grammar(self, json_schema: Mapping[str, Any] | str) -> schema.Grammar:
        """The grammar of a JSON schema for answers of this model.

        Raises:
            UsageError: the schema, or the model's tokenizer, is not supported.
        """
        text = schema_text(json_schema)
        found = self._grammars.get(text)
        if found is None:
            found = self._vocabulary.compile(text)
            # Only the last schema is kept. The result is `found`, because another thread may clear this one.
            self._grammars.clear()
            self._grammars[text] = found
        return found

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Options of `Engine.generate` that the checkpoint's generation_config.json recommends for sampling and penalties;
        empty if it has none.
        """
        return {**self.recommended.sampling, **self.recommended.penalties}

    def prompt(
        self,
        document: str | None = None,
        *,
        messages: Iterable[Mapping[str, str]] | None = None,
        instruction: str | None = None,
        system_prompt: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        name: str = "the prompt",
        context: int | None = None,
    ) -> Prompt:
        """Encodes a document: as it is, or as a conversation if there is an instruction or a system prompt. Or encodes
        `messages` of several turns, each {"role": "system" | "user" | "assistant", "content": text}, the last one the
        user's.

        `template_args` are arguments of the chat template: {"enable_thinking": True} turns on thinking in models that
        support it. A document that cannot fit the context (by default the model's) is refused before it is encoded.

        Raises:
            QuantspecError: an argument is wrong, a text is not UTF-8 or does not fit, or the chat template failed.
        """
        written = self.written(
            document,
            messages=messages,
            instruction=instruction,
            system_prompt=system_prompt,
            template_args=template_args,
            name=name,
            context=context,
        )
        return self.encoded([written])[0]

    def encoded(self, texts: Sequence[Written]) -> list[Prompt]:
        """The prompts of texts from `written`; several are encoded on all processors."""
        ids: list[list[int]] = [[]] * len(texts)
        for special in (True, False):
            places = [place for place, text in enumerate(texts) if text.continues is special]
            begun = [texts[place].parts[0] for place in places]
            found = self.tokenizer.encode_all(begun, special=special) if begun else []
            rest = iter(self.tokenizer.encode_rest([part for place in places for part in texts[place].parts[1:]]))
            for place, of_first in zip(places, found, strict=True):
                ids[place] = of_first + [id for _ in texts[place].parts[1:] for id in next(rest)]
        return [
            Prompt(of_text, continues=text.continues, name=text.name, thinking=text.thinking)
            for of_text, text in zip(ids, texts, strict=True)
        ]

    def written(
        self,
        document: str | None = None,
        *,
        messages: Iterable[Mapping[str, str]] | None = None,
        instruction: str | None = None,
        system_prompt: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        name: str = "the prompt",
        context: int | None = None,
    ) -> Written:
        """The text of `prompt`, not yet encoded."""
        if context is not None:
            context = whole("context", context, 1, None)
        limit = self.context if context is None else context
        arguments = conversation.checked_arguments({} if template_args is None else template_args)
        turns = None if messages is None else conversation.checked(messages)
        if turns is not None:
            if not (document is None and instruction is None and system_prompt is None):
                raise UsageError("messages and a document exclude each other", "put all of it into messages")
            document = "".join(turn["content"] for turn in turns)
        check_text(name, document, "give a text, or messages=[...] for a conversation")
        document = cast("str", document)
        for what, text in (("the instruction", instruction), ("the system prompt", system_prompt)):
            if text is not None:
                check_text(what, text)
        check_instruction(instruction)
        converses = turns is not None or instruction is not None or system_prompt is not None
        # A chat template may strip white space around the document.
        least = document.strip() if converses else document
        self._check_length(f"{name} has {len(document)}", least, limit, "split the document")
        if converses and self.chat_template is not None:
            turns = turns or template.messages(document, instruction, system_prompt)
            parts, thinking = conversation.render(self.chat_template, turns, self.tokenizer, arguments)
            self._check_whole(name, "".join(parts), limit)
            return Written(parts, continues=False, name=name, thinking=thinking)
        if turns is not None or arguments:
            what = "template arguments" if turns is None else "messages"
            why, hint = "a document alone is continued without one", "add an instruction or a system prompt"
            if self.chat_template is None:
                why, hint = "the model has none", "use an instruct model, or leave them out"
            option = "thinking" if template.THINKING in arguments else "template_arg"
            raise UsageError(f"{what} need a chat template; {why}", hint, option=option)
        if not converses:
            return Written([document], name=name)
        text = template.plain(document, instruction, system_prompt)
        self._check_whole(name, text, limit)
        return Written([text], name=name)

    def _check_whole(self, name: str, text: str, limit: int) -> None:
        """Refuses a prompt whose document alone may fit."""
        self._check_length(f"{name} and its instructions have {len(text)}", text, limit, "shorten them")

    def _check_length(self, size: str, text: str, limit: int, remedy: str) -> None:
        """Refuses a prompt if its text, or a part of that, cannot fit. Encoding would take over 100 bytes of memory per
        character.
        """
        # Few texts have 8 characters per token.
        cheap = max(8 * limit, CHEAP_CHARACTERS)
        if len(text) <= cheap or self.tokenizer.least_tokens(text, limit + 1) <= limit:
            return
        larger = f"raise the context, up to the model's {self.context}, or " if limit < self.context else ""
        raise DoesNotFitError(
            f"{size} characters and more than {limit} tokens; the context is {limit}",
            f"{larger}{remedy} or choose a model with a longer context",
        )

    def check_fits(self, prompt: Prompt, max_new_tokens: int, context: int) -> int:
        """Tokens of the prompt and its answer together; an error with the numbers if that exceeds the context."""
        length, needed = len(prompt.ids), len(prompt.ids) + max_new_tokens
        if needed <= context:
            return needed
        hints = _shorter(length, max_new_tokens, context)
        if needed <= self.context:
            hints.append(f"raise the context, up to the model's {self.context}")
        elif context < self.context and not hints:
            ways = _shorter(length, max_new_tokens, self.context)
            hints = [f"raise the context to the model's {self.context}, and {' or '.join(ways)}"] if ways else []
        raise DoesNotFitError(
            f"{prompt.name} and its answer need {needed} tokens ({length} + {max_new_tokens}); the context is {context}",
            " or ".join(hints) or "choose a model with a longer context",
        )

    @contextmanager
    def naming_context(self, context: int, source: str) -> Iterator[None]:
        """Begins the hint of an error about a context below the model's with its source."""
        try:
            yield
        except DoesNotFitError as error:
            if context < self.context:
                error.hint = source + error.hint
            raise

    def resolve_context(self, wanted: int | None) -> int:
        """A context in tokens: the requested one (None or 0: the model's), checked against the model's."""
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


def _shorter(length: int, max_new_tokens: int, context: int) -> list[str]:
    """Each way to fit a prompt and its answer into a context by changing one of them."""
    answer, prompt = context - length, context - max_new_tokens
    ways = []
    if answer > 0:
        ways.append(f"ask for at most {answer} new token{'s' * (answer > 1)} (-n)")
    if prompt > 0:
        ways.append(f"shorten the prompt to {prompt} token{'s' * (prompt > 1)}")
    return ways


def planned(
    model: Model,
    options: EngineOptions,
    *,
    context: int,
    batch: int = 1,
    pool: int | None = None,
    opened: _native.OpenDevice | None = None,
) -> dict[str, Any]:
    """Memory of an engine, before any weight is read: `_native.plan` of these options."""
    from . import _native

    with native_errors():
        return _native.plan(
            str(model.directory),
            capacity=context,
            slots=batch,
            pool_tokens=pool,
            draft_model=model.draft_model(options.draft_model),
            opened=opened,
            **options.native(),
        )
