"""`--long map-reduce`: a document beyond the context, answered in parts.

Map: the text is split at paragraph borders into parts that fit, and the instruction is applied to each. Reduce: the
partial answers, in order, form a document to which the instruction is applied again, until one answer is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import DoesNotFitError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .generation import Generation

# Characters encoded at a time when counting tokens: encoding takes over 100 bytes of memory per character.
COUNTED_CHARACTERS = 1_000_000

# Borders at which a text may be split, best first: paragraphs, lines, sentences, words. The separator stays with the left
# part.
_BORDERS = (r"\n\s*\n", r"\n", r"(?<=[.!?])\s+", r"\s+")


@dataclass
class Call:
    """One call of the model and its input: a node of the tree in results.jsonl.

    Attributes:
        generation: the call's answer.
        parts: the calls whose answers were its input; empty if the input was the document or a part of it.
        whole: the input was the whole document.
    """

    generation: Generation
    parts: Sequence[Call] = field(default_factory=list)
    whole: bool = False

    @property
    def text(self) -> str:
        """The answer as an input of another call."""
        return self.generation.text.strip()

    def tree(self) -> Iterator[Call]:
        """This call, and all that its input depends on."""
        yield self
        for part in self.parts:
            yield from part.tree()

    def warnings(self) -> Iterator[str]:
        """Names the parts of the document that had no influence on this answer, because a partial answer is empty. Says if
        the answer itself is empty.
        """
        parts = [without for call in self.parts for without in call._without_text()]
        if empty := [number for number, without in enumerate(parts, 1) if without]:
            some, have = ("part", "has an empty answer") if len(empty) == 1 else ("parts", "have empty answers")
            yield f"{some} {_ranges(empty)} of {len(parts)} {have}"
        if not self.text:
            yield f"the answer is empty{self._why_empty()}"

    def _why_empty(self) -> str:
        match self.generation.stop_reason:
            case "length" if self.generation.thinks:
                return ": it was cut inside its thinking block (raise -n or -c)"
            case "length" if self.generation.thinking is not None:
                return ": it was cut at -n or -c, after its thinking"
            case "stop":
                return ": it begins with a stop string"
            case _:
                return ""

    def _without_text(self) -> Iterator[bool]:
        """For each part of the document that this call depends on: True if its answer, or one made from it, is empty."""
        if not self.parts:
            yield not self.text
        for part in self.parts:
            for without in part._without_text():
                yield without or not self.text

    def to_json(self) -> dict[str, Any]:
        """The node for results.jsonl. It includes the texts of partial answers, which have no files."""
        generation = self.generation
        node: dict[str, Any] = {
            "prompt_tokens": generation.prompt_tokens,
            "new_tokens": len(generation.tokens),
            "stop_reason": generation.stop_reason,
            "text": generation.text,
        }
        if self.parts:
            node["parts"] = [part.to_json() for part in self.parts]
        return node


def answer(
    name: str,
    text: str,
    *,
    budget: int,
    count: Callable[[str], int],
    call: Callable[[Sequence[str], bool], Sequence[Generation]],
) -> Call:
    """The answer to a text that may exceed the context.

    Args:
        name: the document's name in errors.
        text: the document.
        budget: most tokens of a call's prompt.
        count: tokens of the prompt made from a text.
        call: runs the model on texts whose prompts are within the budget; returns the answers in their order. The flag is
            True if the answer, to one text, is that to the document.

    Raises:
        DoesNotFitError: two partial answers do not fit in one prompt.
        InputError: all partial answers are empty.
    """
    parts = split(name, text, budget, count)
    whole = len(parts) == 1
    # A model would make up an answer to a part without text.
    parts = [part for part in parts if not part.isspace()]
    calls = [Call(generation, whole=whole) for generation in call(parts, len(parts) == 1)]
    while len(calls) > 1:
        if not any(part.text for part in calls):  # as above
            raise _all_empty(name, calls)
        groups = _groups(name, calls, budget, count)
        answers = iter(call([_joined(group) for group in groups if len(group) > 1], len(groups) == 1))
        calls = [Call(next(answers), group) if len(group) > 1 else group[0] for group in groups]
    return calls[0]


def split(name: str, text: str, budget: int, count: Callable[[str], int]) -> list[str]:
    """Splits a text into parts of about equal length whose prompts are within the budget; joined, the parts are the text.

    A split is at the best border available: between paragraphs, lines, sentences or words. It is between characters only
    if a single word exceeds the budget.
    """
    whole = tokens_of(text, count)
    if whole <= budget:
        return [text]
    # Equal parts: a short last part would weigh as much in the reduced answer as a long one.
    wanted = parts_of(name, whole, budget, count)
    target = min(-(-len(text) // wanted) + len(text) // (20 * wanted), len(text) - 1)
    parts: list[str] = []
    rest = text
    while rest:
        part = _beginning(rest, max(target, 1)) if len(rest) > target else rest
        while count(part) > budget:
            if len(part) == 1:
                raise _too_small(name, count(part), budget)
            part = _beginning(part, len(part) * 9 // 10)
        parts.append(part)
        rest = rest[len(part) :]
    return parts


def parts_of(name: str, whole: int, budget: int, count: Callable[[str], int]) -> int:
    """Number of parts of a text whose prompt has `whole` tokens, more than the budget.

    Raises:
        DoesNotFitError: the budget is too small for any part.
    """
    empty = count(".")
    if empty > budget:
        raise _too_small(name, empty, budget)
    return max(2, -(-(whole - empty) // max(budget - empty, 1)))


class Planned(NamedTuple):
    """Calls for a document, and tokens of their prompts."""

    calls: int
    prompt_tokens: int


def planned(name: str, whole: int, budget: int, count: Callable[[str], int], new_tokens: int) -> Planned:
    """The calls for a text whose prompt has `whole` tokens, if every answer has `new_tokens`.

    Raises:
        DoesNotFitError: the budget is too small for a part, or for two such answers.
    """
    if whole <= budget:
        return Planned(1, whole)
    calls = answers = parts_of(name, whole, budget, count)
    empty = count(".")
    # The text around a partial answer, or a little more.
    heading = -(-(count(_numbered([".", "."])) - empty) // 2)
    answer = new_tokens + heading
    together = (budget - empty) // answer
    if together < 2:
        most = (budget + new_tokens - empty - 2 * heading) // 3
        raise DoesNotFitError(
            f"{name}: two partial answers of {new_tokens} tokens make a prompt of {empty + 2 * answer} tokens, the context "
            f"leaves {budget}",
            f"ask for at most {most} new tokens (-n), or raise -c" if most > 0 else "raise -c",
        )
    tokens = whole + (calls - 1) * empty
    while answers > 1:
        prompts = -(-answers // together)
        tokens += answers * answer + prompts * empty
        answers = prompts
        calls += prompts
    return Planned(calls, tokens)


def _too_small(name: str, tokens: int, budget: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"{name}: a prompt of one character has {tokens} tokens, the context leaves {budget}", "raise -c or lower -n"
    )


def tokens_of(text: str, count: Callable[[str], int]) -> int:
    """Tokens of the prompt made from a text. A long text is counted in pieces, each including the tokens around it: a slight
    overestimate.
    """
    pieces = (text[at : at + COUNTED_CHARACTERS] for at in range(0, len(text), COUNTED_CHARACTERS))
    return sum(map(count, pieces))


def _beginning(text: str, length: int) -> str:
    """The beginning of a text, at most `length` characters, split at the best border in its second half."""
    length = max(length, 1)
    longest = text[:length]
    for border in _BORDERS:
        ends = [found.end() for found in re.finditer(border, longest) if found.end() > length // 2]
        if ends:
            return longest[: ends[-1]]
    return longest


def _groups(name: str, calls: Sequence[Call], budget: int, count: Callable[[str], int]) -> list[list[Call]]:
    """Groups of adjacent calls whose answers fit together in one prompt. An empty answer takes no place in it."""
    groups: list[list[Call]] = []
    for call in calls:
        if groups and count(_joined([*groups[-1], call])) <= budget:
            groups[-1].append(call)
        else:
            groups.append([call])
    if all(len(group) == 1 for group in groups):
        pair = count(_joined(calls[:2]))
        raise DoesNotFitError(
            f"{name}: two partial answers make a prompt of {pair} tokens, the context leaves {budget}",
            "lower -n, or raise -c",
        )
    return groups


def _all_empty(name: str, calls: Sequence[Call]) -> InputError:
    # A thinking block may take all tokens.
    cut = any(call.generation.stop_reason == "length" for call in calls)
    return InputError(
        f"{name}: its {len(calls)} partial answers are empty",
        "raise -n or -c" if cut else "use another instruction or another model",
    )


def _joined(calls: Sequence[Call]) -> str:
    return _numbered([call.text for call in calls if call.text])


def _numbered(answers: Sequence[str]) -> str:
    return "\n\n".join(f"Part {number}:\n{answer}" for number, answer in enumerate(answers, 1))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: "2, 5-7 and 9"."""
    # In a run of consecutive numbers, number and index grow together.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    *others, last = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{', '.join(others)} and {last}" if others else last
