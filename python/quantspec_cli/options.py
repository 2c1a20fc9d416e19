"""Options of decoding: checked values. `flags` has the flags that set them."""

from __future__ import annotations

import json
import math
import operator
import struct
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import _native
from .errors import IgnoredError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Method(NamedTuple):
    """A decoding method and the settings it supports.

    Attributes:
        about: what a draft reads, for `--help`.
        drafts: whether it drafts at all.
        draft_weights: whether it reads 4-bit weights.
        draft_view: the view of the target's cache that it reads, "target" for the target's own; None for none.
        pages: default number of pages, if the method chooses them by its own rule.
        page_choice: this rule, as named in reports: "window" (the first and the newest pages) or "snap" (those that the
            prompt's end attends to).
        draft_model: whether another checkpoint drafts; views and pages are those of its own cache.
        chooses: whether it chooses among several other methods while decoding, and may use a draft model.
    """

    about: str
    drafts: bool
    draft_weights: bool
    draft_view: str | None
    pages: int | None
    page_choice: str | None
    draft_model: bool
    chooses: bool


# The engine's registry. Reading it loads the native module, in about 2 ms.
METHODS = {method.pop("name"): Method(**method) for method in _native.methods()}
# Methods that copy earlier text if they find a continuation there, and draft as NAME otherwise.
COMBINED = {name: method for name, method in METHODS.items() if name.endswith("+ngram")}
WEIGHTS = ("checkpoint", "int8", "int4", "auto")
KV_TARGETS = ("int8", "fp16", "int4")
KV_ROUNDINGS = ("balanced", "paper")
# Ablations of `eval`: drafts that read truncated codes; axes and sizes of groups in the cache. The engine uses the first axis
# for keys, the second for values, and the last size.
TRUNCATE = "truncate"
AXES = ("channel", "token")
GROUPS = ("32", "64", "128")
DRAFT_WEIGHTS = ("int4", "int4-mlp", "none")
# Matrices that a draft may read in 8 bits (Sensitive::KINDS in quantspec-core).
SENSITIVE = ("qkv", "o", "gate-up", "down")
PAGE_CHOICES = ("best", "window")
ACCEPTANCE = ("replay", "rejection")

# Largest γ, far above the values that pay (GAMMA_MAX in quantspec-core).
GAMMA_MAX = 16
# Fewest selected pages: the first and the newest one are always read.
PAGES_MIN = 2
# More than any cache has, and small enough for the engine's integers.
PAGES_MAX = 2**32
SEED_MAX = 2**64 - 1
# Sequences of a step whose rows, one and the longest draft of each, fit in 16 bits (STEP_ROWS_MAX in quantspec-py).
BATCH_MAX = (2**16 - 1) // (GAMMA_MAX + 1)
# More than any machine has, and small enough for the system's integers.
THREADS_MAX = 4096
# Longest n-grams that can be forbidden (NGRAM_MAX in quantspec-core), and most tokens of a position with log-probabilities.
NGRAM_MAX = 100
LOGPROBS_MAX = 20
MAX_NEW_TOKENS = 256
# Defaults of `run` with a chat template: a summary of two pages, and one with thinking first.
MAX_REPLY_TOKENS = 1024
MAX_THOUGHTFUL_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engine options, independent of the text. `quantspec run --help` describes each value."""

    device: str = "auto"
    threads: int | None = None
    method: str = "quantspec"
    weights: str = "checkpoint"
    kv_target: str = "int8"
    kv_rounding: str = "balanced"
    draft_weights: str = "int4"
    draft_precision: str = "auto"
    draft_pages: int | Literal["all", "auto"] | None = None
    page_choice: str | None = None
    draft_refresh: int = 0
    draft_model: str | None = None
    draft_model_kv: str | None = None
    accept: str = "replay"
    gamma: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        _one_of("method", self.method, tuple(METHODS))
        _one_of("weights", self.weights, WEIGHTS)
        _one_of("kv_target", self.kv_target, KV_TARGETS)
        _one_of("kv_rounding", self.kv_rounding, KV_ROUNDINGS)
        _one_of("draft_weights", self.draft_weights, DRAFT_WEIGHTS)
        self._check_precision()
        if self.page_choice is not None:
            _one_of("page_choice", self.page_choice, PAGE_CHOICES)
        if self.draft_model_kv is not None:
            _one_of("draft_model_kv", self.draft_model_kv, KV_TARGETS)
        _one_of("accept", self.accept, ACCEPTANCE)
        kind, _, index = (self.device if isinstance(self.device, str) else "").partition(":")
        if kind not in {"auto", "cpu", "cuda"} or (":" in self.device and (kind != "cuda" or not _is_index(index))):
            raise UsageError(f"device is {shown(self.device)}", "use auto, cpu, cuda or cuda:0", option="device")
        if self.threads is not None:
            _set_whole(self, "threads", 1, THREADS_MAX)
        if not _is_word(self.gamma, "auto"):
            _set_whole(self, "gamma", 0, GAMMA_MAX, ", or auto")
        if self.draft_pages is not None and not _is_word(self.draft_pages, "all", "auto"):
            _set_whole(self, "draft_pages", PAGES_MIN, PAGES_MAX, ", all or auto")
        _set_whole(self, "draft_refresh", 0, PAGES_MAX, " (0 is never)")
        self._refuse_ignored()
        if self.page_choice == "window" and self.pages_of_draft == "all":
            raise IgnoredError(
                "page_choice is 'window', and the draft reads all pages",
                "add --draft-pages N, or leave it out",
                option="page_choice",
            )
        check_scores(self.method, self.pages_of_draft, self.choice_of_pages, self.kv_target, self.draft_model_kv)

    def _check_precision(self) -> None:
        """Refuses unknown names of matrices, and matrices without two precisions."""
        if _is_word(self.draft_precision, "auto", "none"):
            return
        named = self.draft_precision.split(",") if isinstance(self.draft_precision, str) else []
        drafted = {"int4": SENSITIVE, "int4-mlp": SENSITIVE[2:], "none": ()}[self.draft_weights]
        if not named or not set(named) <= set(SENSITIVE):
            raise UsageError(
                f"draft_precision is {shown(self.draft_precision)}",
                f"use auto, none, or a comma list of {', '.join(SENSITIVE)}",
                option="draft_precision",
            )
        if self.weights == "int4":
            reason = ", and weights int4 have no 8 bits to read"
            hint = "use --weights int8 or checkpoint, or leave it out"
        elif full := [kind for kind in named if kind not in drafted]:
            reason = f", and the draft reads {full[0]} as the target has it"
            hint = "use --draft-weights int4, or leave it out"
        else:
            return
        raise IgnoredError(f"draft_precision is {shown(self.draft_precision)}{reason}", hint, option="draft_precision")

    def _refuse_ignored(self) -> None:
        """Refuses settings that the method would ignore."""
        if METHODS[self.method].draft_model and self.draft_model is None:
            raise UsageError(
                f"method {self.method} has no draft model",
                "name a checkpoint of the same tokenizer with --draft-model",
                option="draft_model",
            )
        for name, (harmless, reason) in {**self._ignored(), **self._ignored_of_pages()}.items():
            value = getattr(self, name)
            if value not in (None, harmless):
                raise IgnoredError(
                    f"{name} is {shown(value)}, and method {self.method} {reason}",
                    "leave it out, or choose another method",
                    option=name,
                )

    def _ignored(self) -> dict[str, tuple[str | None, str]]:
        """Settings without effect: the value that is harmless, and why another one is refused."""
        method = METHODS[self.method]
        reasons: dict[str, tuple[str | None, str]] = {}
        if not method.draft_model and not method.chooses:
            reasons["draft_model"] = (None, "reads no draft model, unlike draft-model and auto")
        if self.draft_model is None:
            reasons["draft_model_kv"] = (None, "has no draft model")
        if not method.drafts and self.gamma != 0:
            reasons["gamma"] = ("auto", "drafts nothing")
        if not method.draft_weights and self.draft_weights != "none":
            reasons["draft_weights"] = (DRAFT_WEIGHTS[0], "reads no draft weights")
        if not method.draft_weights and self.draft_precision != "none":
            reasons["draft_precision"] = ("auto", "reads no draft weights")
        if self.method.partition("+")[0] == "qspec" and self.draft_weights == "none":
            reasons["draft_weights"] = (None, "has 4-bit activations for 4-bit weights only")
        if not self._quantises_a_cache:
            reasons["kv_rounding"] = (KV_ROUNDINGS[0], "quantises no cache with kv_target fp16")
        return reasons

    def _ignored_of_pages(self) -> dict[str, tuple[str | None, str]]:
        """The same of pages."""
        method = METHODS[self.method]
        reasons: dict[str, tuple[str | None, str]] = {}
        if method.draft_view is None:
            reasons["draft_pages"] = ("all", "reads no pages to draft")
            reasons["page_choice"] = (None, "reads no pages to draft")
        elif method.page_choice is not None:
            reason = "chooses pages by its own rule"
            reasons["page_choice"] = (method.page_choice, reason)
            if self.draft_pages == "all":
                reasons["draft_pages"] = (None, reason)
        if method.page_choice != "snap" and self.draft_refresh != 0:
            reasons["draft_refresh"] = (None, "keeps no choice of pages")
        return reasons

    @property
    def _quantises_a_cache(self) -> bool:
        """False if neither the target nor a draft reads a quantised cache."""
        views = {self.kv_target, METHODS[self.method].draft_view, self.draft_model_kv}
        return not views <= {None, "target", "fp16"}

    @property
    def weights_of_draft(self) -> str:
        """The draft weights as named in reports: "none" for a method that reads none."""
        return self.draft_weights if METHODS[self.method].draft_weights else "none"

    @property
    def view_of_draft_model(self) -> str:
        """The view of a draft model's own cache."""
        return self.draft_model_kv or self.kv_target

    @property
    def pages_of_draft(self) -> int | Literal["all", "auto"]:
        """The number of pages a draft reads, as named in reports."""
        method = METHODS[self.method]
        # A fixed gamma fixes what a draft reads, too: then rejection repeats its text.
        measured = method.chooses or (method.draft_view == "int4" and self.gamma == "auto")
        return self.draft_pages or method.pages or ("auto" if measured else "all")

    @property
    def choice_of_pages(self) -> str:
        """The choice of pages, if a draft does not read all, as named in reports."""
        return METHODS[self.method].page_choice or self.page_choice or PAGE_CHOICES[0]

    def native(self) -> dict[str, Any]:
        """Keyword arguments of `_native.Engine`."""
        pages = self.pages_of_draft
        return {
            "device": self.device,
            "threads": self.threads,
            "method": self.method,
            "weights": self.weights,
            "kv_target": self.kv_target,
            "kv_rounding": self.kv_rounding,
            "draft_weights": self.draft_weights,
            "draft_precision": self.draft_precision,
            "draft_pages": None if pages == "all" else pages,
            "page_choice": self.choice_of_pages,
            "draft_refresh": self.draft_refresh,
            "draft_model_kv": self.draft_model_kv,
            "accept": self.accept,
            "gamma": None if self.gamma == "auto" else self.gamma,
        }


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How tokens of a text are chosen and where it ends. Temperature 0 is greedy. With `shortens` an answer near the end of
    the context may have fewer than `max_new_tokens`.
    """

    max_new_tokens: int = MAX_NEW_TOKENS
    shortens: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram: int = 0
    seed: int = 0
    stop: str | Iterable[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: Any = None

    def __post_init__(self) -> None:
        _set_whole(self, "max_new_tokens", 1, None)
        _set_whole(self, "top_k", 0, 2**32, " (0 is off)")
        for name, valid, hint in (
            ("temperature", lambda t: 0 <= t <= 100, "use 0 (greedy) to 100"),
            ("top_p", lambda p: 0 < p <= 1, "use a number above 0, at most 1 (1 is off)"),
            ("min_p", lambda p: 0 <= p <= 1, "use 0 (off) to 1"),
            ("repetition_penalty", lambda p: 0.01 <= p <= 100, "use 0.01 to 100 (1 is off; 1.1 to 1.3 are usual)"),
            ("frequency_penalty", lambda p: -2 <= p <= 2, "use -2 to 2 (0 is off)"),
            ("presence_penalty", lambda p: -2 <= p <= 2, "use -2 to 2 (0 is off)"),
        ):
            object.__setattr__(self, name, _number(name, getattr(self, name), valid, hint))
        _set_whole(self, "no_repeat_ngram", 0, NGRAM_MAX, " (0 is off)")
        if self.no_repeat_ngram == 1:
            raise UsageError(
                "no_repeat_ngram is 1, so no token could come twice",
                f"use 0 (off) or 2 to {NGRAM_MAX}",
                option="no_repeat_ngram",
            )
        if self.logprobs is not None:
            _set_whole(self, "logprobs", 0, LOGPROBS_MAX)
        _set_whole(self, "seed", 0, SEED_MAX)
        boolean("ignore_eos", self.ignore_eos)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
            if self.ignore_eos:
                raise UsageError(
                    "ignore_eos is True, and a JSON schema decides where the answer ends",
                    "leave one of them out",
                    option="ignore_eos",
                )
        stops = [self.stop] if isinstance(self.stop, str) else as_list(self.stop)
        if stops is None or not all(isinstance(stop, str) for stop in stops):
            raise UsageError(f"stop is {shown(self.stop):.60}", "give a string, or a list of strings", option="stop")
        object.__setattr__(self, "stop", tuple(stops))
        if not all(stops):
            raise UsageError("a stop string is empty", "give at least one character", option="stop")

    def new_tokens(self, prompt_tokens: int, context: int) -> int:
        """Most tokens of the answer to a prompt; at least one, even if the context leaves none."""
        return max(1, min(self.max_new_tokens, context - prompt_tokens)) if self.shortens else self.max_new_tokens

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `_native.Engine.add`."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "no_repeat_ngram": self.no_repeat_ngram,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "logprobs": self.logprobs,
        }


def schema_text(schema: object) -> str:
    """A JSON schema, its text or an object as `json.loads` makes it, as one text: equal schemas are equal texts.

    Raises:
        UsageError: it is no schema.
    """
    hint = 'give a JSON schema such as {"type": "object", "properties": {...}}'
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found, allow_nan=False)
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply", "use fewer levels", option="json_schema") from error
    except (ValueError, TypeError) as error:
        if isinstance(error, TypeError):
            hint = "give a dictionary or JSON text; a pydantic model has model_json_schema()"
        if "set_int_max_str_digits" in str(error):
            raise UsageError(
                "the JSON schema has an integer of thousands of digits", "use a smaller one", option="json_schema"
            ) from error
        raise UsageError(f"the JSON schema is not valid JSON: {error}", hint, option="json_schema") from error
    if not isinstance(found, dict):
        raise UsageError(f"the JSON schema is {text:.60}, and no object", hint, option="json_schema")
    return text


def no_draft_model(view: str) -> IgnoredError:
    """The error of a view of a draft model's cache without a draft model."""
    return IgnoredError(
        f"--draft-model-kv is {view}, but there is no draft model",
        "name one with --draft-model, or leave it out",
        option="draft_model_kv",
    )


def check_scores(name: str, pages: object, choice: str, target: str, draft_model_kv: str | None) -> None:
    """Refuses a choice of the best pages of a cache in FP16 alone: pages are scored by their 4-bit view. `draft_model_kv` is
    the view of a draft model's cache, None for the target's.
    """
    method = METHODS[name]
    all_pages = "--draft-pages all"
    if method.draft_model or method.chooses:
        cache, view = "the draft model's cache", draft_model_kv or (target if method.draft_model else None)
        # `auto` chooses pages of its own.
        remedy = all_pages if draft_model_kv is None else "--draft-model-kv int8"
    else:
        cache, view, remedy = "the cache", target if method.draft_view == "target" else None, all_pages
    if pages != "all" and choice == PAGE_CHOICES[0] and view == "fp16":
        raise UsageError(
            f"draft_pages is {shown(pages)}, and {cache} in FP16 has no scores to choose the best pages by",
            f"use --page-choice window, or {remedy}",
            option="draft_pages",
        )


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if not _is_word(value, *choices):
        raise UsageError(f"{name} is {shown(value)}", f"use one of {', '.join(choices)}", option=name)


def _is_word(value: object, *words: str) -> bool:
    # The type comes first: an array compares its items.
    return isinstance(value, str) and value in words


def boolean(name: str, value: object) -> None:
    """Refuses anything but True and False: as a condition, the text "false" is true."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {shown(value):.60}", "use True or False", option=name)


def as_list(value: object) -> list[Any] | None:
    """The items of an iterable, which is read once, because a generator yields them only once. None for a text, and for what
    cannot be iterated, such as an array without a dimension.
    """
    if isinstance(value, str | bytes):
        return None
    try:
        found = iter(value)  # type: ignore[call-overload]
    except TypeError:
        return None
    return list(found)


def _set_whole(options: object, name: str, least: int, most: int | None, other: str = "") -> None:
    """Checks a whole number of frozen options, and makes it Python's: sums of NumPy's integers overflow."""
    object.__setattr__(options, name, whole(name, getattr(options, name), least, most, other))


def whole(name: str, value: object, least: int, most: int | None, other: str = "") -> int:
    """The integer, which must be from `least` to `most`; NumPy's are accepted."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most) or _is_unprintable(number):
        too_large = number is not None and most is not None and number > most
        bounds = f"at least {least}" if most is None or (most >= 2**32 and not too_large) else f"{least} to {most}"
        raise UsageError(f"{name} is {shown(value)}", f"use a whole number, {bounds}{other}", option=name)
    return number


def _number(name: str, value: object, valid: Callable[[float], bool], hint: str) -> float:
    """The number, or 0 if it is so small that it is 0 in the engine's 32 bits; refuses values that are invalid as either."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if math.isfinite(number) and valid(number):
        number = number if _single(number) else 0.0
        if valid(number):
            return number
    raise UsageError(f"{name} is {shown(value)}", hint, option=name)


def _single(number: float) -> float:
    """A number of moderate size, rounded to 32 bits."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def shown(value: object) -> str:
    """A value for a message: Python refuses to print integers with thousands of digits."""
    if isinstance(value, int) and _is_unprintable(value):
        return f"a number of {value.bit_length()} bits"
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"


def _is_unprintable(number: int) -> bool:
    return number.bit_length() > 256


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 3
