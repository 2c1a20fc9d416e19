"""Lists on the command line, in llama-bench's grammar: `0,512`, `0-4096+1024`, `1-64*2`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .options import PAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Most values of one option; more are a typing error (0-100000).
LIST_MAX = 256


def items(flag: str, given: str) -> list[str]:
    """The items of a comma list."""
    found = [item.strip() for item in given.split(",")]
    if not all(found):
        raise UsageError(f"{flag} has an empty item in {given!r}", "separate the values by single commas", option=flag)
    return found


def numbers(flag: str, given: str) -> list[int]:
    """The numbers of a list of `N`, `a-b`, `a-b+step` and `a-b*factor`, in order, each once."""
    hint = f"use whole numbers and ranges: {flag} 0,512 or 0-4096+1024 or 1-64*2"
    return _each_once(flag, given, lambda item: _range(flag, item, hint))


def numbers_or(flag: str, given: str, words: Sequence[str], least: int, most: int) -> list[Any]:
    """As `numbers`, with limits and additional words: `1-4,auto`."""
    return _each_once(flag, given, lambda item: _number_or(flag, item, words, least, most))


def _each_once(flag: str, given: str, values: Callable[[str], Iterable[Any]]) -> list[Any]:
    found: dict[Any, None] = {}
    for item in items(flag, given):
        for value in values(item):
            found[value] = None
            if len(found) > LIST_MAX:
                raise UsageError(
                    f"{flag} {item} is more than {LIST_MAX} values", "use a larger step: a-b+step", option=flag
                )
    return list(found)


def _range(flag: str, item: str, hint: str) -> Iterator[int]:
    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            raise UsageError(f"{flag} has {item!r}", hint, option=flag)
        return int(text)

    first, dash, rest = item.partition("-")
    if not dash:
        yield whole(item)
        return
    last, operator, step = next((parts for sign in "+*" if (parts := rest.partition(sign))[1]), (rest, "+", "1"))
    value, end, by = whole(first), whole(last), whole(step)
    if end < value or (operator == "+" and by < 1) or (operator == "*" and (by < 2 or value < 1)):
        raise UsageError(
            f"the range {item} of {flag} never ends or is empty",
            "use a-b+step or a-b*factor, with a up to b",
            option=flag,
        )
    while value <= end:
        yield value
        value = value + by if operator == "+" else value * by


def _number_or(flag: str, item: str, words: Sequence[str], least: int, most: int) -> Iterator[Any]:
    def hint(*, too_large: bool) -> str:
        bounds = f"{least} to {most}" if most < PAGES_MAX or too_large else f"at least {least}"
        return f"use whole numbers, {bounds}, ranges of them such as 2-8*2, or {' or '.join(words)}"

    if item in words:
        yield item
        return
    if "-" in item:
        for number in _range(flag, item, hint(too_large=False)):
            if not least <= number <= most:
                raise UsageError(f"{flag} has {item!r}", hint(too_large=number > most), option=flag)
            yield number
        return
    # Python does not parse numbers with thousands of digits.
    digits = (item.lstrip("0") or "0") if item.isascii() and item.isdigit() else ""
    too_large = len(digits) > 12 or (digits != "" and int(digits) > most)
    if not digits or too_large or int(digits) < least:
        raise UsageError(f"{flag} has {item!r}", hint(too_large=too_large), option=flag)
    yield int(digits)
