"""Lists of numbers in flags, in the grammar of llama-bench."""

from __future__ import annotations

import pytest

from quantspec_cli import lists
from quantspec_cli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0", [0]),
        ("512,0, 128", [512, 0, 128]),
        ("0-4096+1024", [0, 1024, 2048, 3072, 4096]),
        ("0-10+4", [0, 4, 8]),
        ("1-64*4", [1, 4, 16, 64]),
        ("3-5", [3, 4, 5]),
        ("7,7,5-8", [7, 5, 6, 8]),
    ],
)
def test_a_list_has_the_numbers_of_its_ranges_each_once(text: str, values: list[int]) -> None:
    assert lists.numbers("-d", text) == values


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "1,,x",
        "x",
        "1,",
        "-1",
        "1-",
        "5-1",
        "1-8*1",
        "0-8*2",
        "0-8+0",
        "1.5",
        "1-2-3",
        "0-100000",
        "1-1000000",
        "4-1,8",
        "1-2,1-8*0",
        "1-8+",
        "1-8+2*2",
        "²",
        "9" * 40,
    ],
)
def test_malformed_lists_of_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="-d"):
        lists.numbers("-d", text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("auto", ["auto"]),
        ("4", [4]),
        ("1-4,auto", [1, 2, 3, 4, "auto"]),
        ("auto, 0-16+8,2", ["auto", 0, 8, 16, 2]),
        # The values of a range count, not its upper limit.
        ("1-30*2", [1, 2, 4, 8, 16]),
        ("3,1-4,auto,auto", [3, 1, 2, 4, "auto"]),
    ],
)
def test_a_list_may_mix_numbers_ranges_and_words(text: str, values: list[int | str]) -> None:
    assert lists.numbers_or("--gamma", text, ("auto",), 0, 16) == values


def test_pages_are_a_list_with_ranges_too() -> None:
    assert lists.numbers_or("--draft-pages", "all,8-64*2,4294967296,auto", ("all", "auto"), 2, 2**32) == [
        *("all", 8, 16, 32, 64, 2**32, "auto"),
    ]
