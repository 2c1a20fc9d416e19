"""JSON schemas for answers: the package llguidance computes which tokens may come next.

The engine masks the logits of every row, including drafted rows, by the result of `Answer.mask`. So masks are part
of the target's distribution, and speculation changes no token.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .errors import InputError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import llguidance

    from .model import Model, Prompt

# White space between JSON's tokens: a space, or a line break with indentation. JSON allows any amount, which a greedy
# model may write without end.
_WHITE_SPACE = r"( |\n[ \t]{0,20})"
_OPTION = "json_schema"
# Keywords whose values are constants, and those whose keys are names.
_CONSTANTS = {"const", "enum"}
_NAMES = {"properties", "patternProperties", "$defs", "definitions"}
# Remedies by words of llguidance's errors; the first that fits applies.
_CORRECT = "correct that value; docs/schema.md lists the supported keywords"
_HINTS = (
    ("^Unimplemented keys|^Unknown format", "docs/schema.md lists the supported keywords; omit the others"),
    ("decimal literal invalid", f"use at most {2**32 - 1}"),
    (
        "^regex parse error|^lookarounds",
        "correct the pattern; look-arounds, word boundaries and back-references are not supported",
    ),
    ("^oneOf constraints", "use anyOf, or alternatives that exclude each other"),
    ("^Resource|^Pointer", "a reference names a definition in the same file, such as #/$defs/NAME"),
    ("^Unsatisfiable schema|^NoExtension|^no text", "change it so that some JSON satisfies it"),
    ("too (big|large|complex)|limit", "simplify the schema: use fewer alternatives and levels"),
)
# Bytes that must be tokens by themselves, so that every JSON can be written.
_PUNCTUATION = b'{}[]":,-.0123456789aeflnrstu'


def read(path: str) -> str:
    """The text of a schema's file."""
    place = Path(path)
    if not files.is_file(place):
        what = "does not exist" if files.status(place) is None else "is not a file"
        raise UsageError(
            f"{one_line(path) or repr(path)} {what}", "name a file that holds a JSON schema", option=_OPTION
        )
    try:
        return files.read(place).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{one_line(path)} is not UTF-8 at byte {error.start}", "save it as UTF-8", option=_OPTION
        ) from error


def check(model: Model, prompts: Sequence[Prompt], schema: str | None) -> None:
    """Refuses a schema or prompt that the engine would refuse later, before weights are loaded."""
    if schema is not None:
        model.grammar(schema)
        for prompt in prompts:
            check_prompt(prompt)


def check_prompt(prompt: Prompt) -> None:
    """Refuses a prompt of a model that thinks before it answers, as no schema allows a thinking block."""
    if prompt.thinking is not None and prompt.thinking.on and prompt.thinking.expected:
        raise UsageError(
            "a JSON schema leaves no room for a thinking block",
            "turn thinking off (--thinking off) if the model can, or use one that answers without thinking",
            option=_OPTION,
        )


class Vocabulary:
    """A model's tokens in llguidance's form."""

    def __init__(self, model: Model) -> None:
        if find_spec("llguidance") is None:
            raise UsageError(
                "JSON schemas need the package llguidance, which is not installed",
                'install it: pip install "quantspec[schema]"',
                option=_OPTION,
            )
        import llguidance

        self.ends = model.eos
        if not self.ends:
            raise UsageError(
                f"{model.name} names no token that ends a text, so no answer could end",
                "use a model whose config.json or tokenizer names an EOS",
                option=_OPTION,
            )
        tokens, special = model.tokenizer.vocabulary()
        tokens += [b""] * (max(self.ends) + 1 - len(tokens))
        known = set(tokens)
        missing = [chr(byte) for byte in _PUNCTUATION if bytes([byte]) not in known]
        if missing:
            raise UsageError(
                f"the tokenizer of {model.name} has no token for {' '.join(missing)}, so it cannot write every JSON",
                "use a model whose tokenizer has a token for every byte, as nearly all have",
                option=_OPTION,
            )
        self._inner = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Words(self, model, tokens, sorted(special | self.ends))),
            eos_token=sorted(self.ends),
        )

    def compile(self, schema: str) -> Grammar:
        """The grammar of a schema.

        Raises:
            UsageError: it cannot be used.
        """
        import llguidance

        if (rounded := _rounded(json.loads(schema))) is not None:
            raise UsageError(
                f"the JSON schema has the constant {rounded!s:.40}, and integers beyond 2**53 would be rounded",
                "use a string, or a pattern of its digits",
                option=_OPTION,
            )
        matcher = llguidance.LLMatcher
        try:
            grammar = matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE})
        except ValueError as error:
            raise _unusable(str(error)) from error
        beginning = matcher(self._inner, grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False))
        # The first mask reveals errors that the constructor does not.
        if beginning.is_error() or not any(beginning.compute_bitmask()) or beginning.is_error():
            raise _unusable(beginning.get_error() or "no text satisfies it")
        return Grammar(beginning, self.ends)

    def words_of(self, text: str) -> list[int]:
        """Tokenizes a text by bytes alone, longest token first."""
        return self._inner.greedy_tokenize(text)


def _rounded(schema: Any) -> int | None:
    """A constant of a schema that is an integer beyond the 53 bits of llguidance's numbers; None if there is none."""
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    while waiting:
        part, constant = waiting.pop()
        if isinstance(part, list):
            waiting += [(item, constant) for item in part]
        elif isinstance(part, dict):
            for key, value in part.items():
                # Names of properties and definitions are no keywords.
                inner = list(value.values()) if key in _NAMES and isinstance(value, dict) else value
                waiting.append((inner, constant or key in _CONSTANTS))
        elif constant and isinstance(part, int) and abs(part) > 2**53:
            return part
    return None


def is_complete(text: str) -> bool:
    """True if an answer is complete JSON. A number could have further digits."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, bool) or not isinstance(found, int | float)


def _unusable(why: str) -> UsageError:
    # Lines after the first are internal states of the library.
    why = why.strip().partition("\n<")[0]
    hint = next((hint for words, hint in _HINTS if re.search(words, why)), _CORRECT)
    # Each message that quotes a regex, which may be the library's own.
    if "decimal literal invalid" in why:
        why = "a length, or a repetition in a pattern, is beyond 32 bits"
    elif why.startswith("regex parse error"):
        why = f"a pattern is wrong: {why.rpartition('error: ')[2]}"
    elif why.startswith("lookarounds"):
        why = "a pattern has a look-around, a word boundary, or an anchor that is not at its ends"
    elif "Regex is empty" in why:
        why = "no text has all of its patterns, format and bounds of length"
    elif why.startswith("NoExtension"):
        why = "no text satisfies it"
    elif why.startswith("oneOf constraints"):
        why = "alternatives of oneOf overlap"
    elif why.endswith("anyOf is empty"):
        why = "enum, anyOf or type is an empty list"
    return UsageError(f"the JSON schema cannot be used: {one_line(why):.300}", hint, option=_OPTION)


class _Words:
    """The tokenizer interface of llguidance."""

    def __init__(self, vocabulary: Vocabulary, model: Model, tokens: Sequence[bytes], special: Sequence[int]) -> None:
        self.eos_token_id = min(model.eos)
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = special
        self._vocabulary, self._tokenizer = vocabulary, model.tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of text that a schema prescribes, by the model's tokenizer. llguidance tests once whether bytes are
        accepted."""
        if isinstance(text, bytes):
            raise TypeError
        ids = self._tokenizer.encode_plain(text)
        if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode():
            return ids
        # SentencePiece puts a space before a word.
        return self._vocabulary.words_of(text)


class Grammar:
    """A compiled schema."""

    def __init__(self, beginning: llguidance.LLMatcher, ends: Container[int]) -> None:
        self._beginning, self._ends = beginning, ends

    def begin(self) -> Answer:
        """An answer without any token."""
        return Answer(self._beginning, self._ends)


class Answer:
    """A position in a grammar, at the end of the committed answer. The engine calls it (`_native.Grammar`)."""

    def __init__(self, beginning: llguidance.LLMatcher, ends: Container[int]) -> None:
        self._beginning, self._ends = beginning, ends
        self._matcher = beginning.deep_copy()
        self._tokens: list[int] = []
        self._ended = False

    def mask(self, drafted: Sequence[int]) -> bytes | None:
        """Tokens that may follow the committed answer and the drafted tokens, one bit each; None if the drafted tokens
        are not allowed.

        Raises:
            InputError: the work exceeds llguidance's limits.
        """
        if self._ended or any(token in self._ends for token in drafted):
            return None
        taken = self._matcher.try_consume_tokens(list(drafted))
        mask = self._matcher.compute_bitmask() if taken == len(drafted) else None
        if not self._matcher.is_error():
            self._matcher.rollback(taken)
        if self._matcher.is_error():
            why = one_line(self._matcher.get_error().strip().partition("\n<")[0])
            # This state is final, and drafted tokens must not end the answer.
            self._matcher = self._beginning.deep_copy()
            self._matcher.try_consume_tokens(self._tokens)
            raise InputError(
                f"the JSON schema takes too much work after {len(self._tokens)} tokens: {why:.300}",
                "simplify the schema: long patterns and bounds of many thousands are the usual reason",
            )
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens to the answer; tokens after its end are ignored."""
        for token in tokens:
            if self._ended or token in self._ends:
                self._ended = True
                return
            self._tokens.append(token)
            self._matcher.try_consume_tokens([token])
