"""From tokens to text: whole characters, stop strings anywhere, and no dependence on how tokens were grouped."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantspec_cli.text import StopStrings, Text, Thinking

EOS = 0


def feed(tokens: list[bytes], cuts: list[int], **options: object) -> Text:
    """A text fed with the tokens in rounds of the sizes `cuts`, then one by one."""
    text = Text(lambda token: tokens[token - 1], **{"limit": 10_000, "eos": {EOS}, **options})  # type: ignore[arg-type]
    ids = [token + 1 for token in range(len(tokens))]
    for size in [*cuts, *[1] * len(ids)]:
        if ids and text.stop_reason is None:
            text.push(ids[:size])
            ids = ids[size:]
    return text


def test_a_character_is_emitted_when_its_last_byte_is() -> None:
    text = Text(lambda token: bytes([token]), limit=99)
    pieces = [text.push([byte]) for byte in "é世🎉".encode()]
    assert pieces == ["", "é", "", "", "世", "", "", "", "🎉"]


def test_half_a_character_at_the_end_is_dropped_but_its_tokens_are_kept() -> None:
    text = Text(lambda token: bytes([token]), limit=5)
    assert text.push("世界".encode()[:5]) == "世"
    assert (text.text, text.stop_reason, len(text.tokens)) == ("世", "length", 5)


def test_invalid_utf8_becomes_replacement_characters() -> None:
    text = feed([b"a", b"\xff", b"b", b"\xe4", b"c"], [])
    assert text.text == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"


def test_nothing_after_an_end_of_text_token_is_emitted() -> None:
    text = Text(lambda _: b"x", limit=99, eos={EOS})
    assert text.push([1, 2, EOS, 3, 4]) == "xx"
    assert (text.tokens, text.stop_reason) == ([1, 2], "eos")


def test_the_limit_counts_tokens() -> None:
    text = Text(lambda _: b"x", limit=3)
    assert text.push([1, 2, 3, 4]) == "xxx"
    assert (text.tokens, text.stop_reason) == ([1, 2, 3], "length")


def test_a_stop_string_across_tokens_inside_a_run_cuts_the_run() -> None:
    text = feed([b"one E", b"N", b"D two", b" three"], [4], stops=["END"])
    assert (text.text, text.stop_reason, text.tokens) == ("one ", "stop", [1, 2])


def test_a_stop_string_can_be_the_first_text() -> None:
    text = feed([b"ENDx"], [], stops=["END"])
    assert (text.text, text.stop_reason, text.tokens) == ("", "stop", [])


def test_the_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    text = Text(lambda token: [b"a E", b"N", b"x"][token], limit=99, stops=["END"])
    assert [text.push([token]) for token in (0, 1, 2)] == ["a ", "", "ENx"]


@pytest.mark.parametrize("end", ["eos", "length", "interrupted"])
def test_held_back_text_is_emitted_at_the_end(end: str) -> None:
    text = Text(lambda _: b"EN", limit=1 if end == "length" else 9, eos={EOS}, stops=["END"])
    piece = text.push([1])
    piece += text.push([EOS]) if end == "eos" else text.interrupt() if end == "interrupted" else ""
    assert (piece, text.text, text.stop_reason) == ("EN", "EN", end)


def test_a_stop_string_may_begin_inside_a_character_split_over_tokens() -> None:
    text = feed([b"x\xe4", b"\xb8", b"\x96y"], [3], stops=["世"])
    assert (text.text, text.stop_reason) == ("x", "stop")


def test_of_overlapping_stop_strings_the_one_that_ends_first_wins() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcdy") == ("xa", True)
    assert StopStrings(["abc", "bc"]).push("xabcdy") == ("x", True)


def test_interrupting_an_ended_text_changes_nothing() -> None:
    text = feed([b"a"], [], limit=1)
    assert (text.interrupt(), text.stop_reason) == ("", "length")


ALPHABET = st.sampled_from(["a", "b", "ab", "é", "世", "\n"])
WORDS = st.lists(ALPHABET, max_size=30).map("".join)
STOPS = st.lists(st.lists(ALPHABET, min_size=1, max_size=4).map("".join), max_size=3)


def chopped(raw: bytes, sizes: list[int]) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(raw[at : at + size])
        at += size
    return [part for part in [*parts, raw[at:]] if part]


def oracle(text: str, stops: list[str]) -> str:
    """Cuts before the stop string that ends first, testing every end position."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(WORDS, STOPS, st.lists(st.integers(1, 4), max_size=40), st.lists(st.integers(1, 17), max_size=20))
def test_the_text_is_a_function_of_the_bytes_alone(
    words: str, stops: list[str], token_sizes: list[int], rounds: list[int]
) -> None:
    text = feed(chopped(words.encode(), token_sizes), rounds, stops=stops)
    text.interrupt()
    assert text.text == "".join(text.pieces) == oracle(words, stops)


def test_nothing_of_a_thinking_block_is_emitted() -> None:
    words = ["\n", "<th", "ink>\n", "hm </th", "ing></thi", "nk>", "\n\n", "Yes", ".\n"]
    text = Text(lambda token: words[token].encode(), limit=99, thinking=Thinking())
    assert [text.push([token]) for token in range(len(words))] == [*[""] * 7, "Yes", ".\n"]
    assert (text.text, text.thinking) == ("Yes.\n", "hm </thing>")
    assert text.tokens == list(range(len(words)))


def test_a_block_that_the_prompt_began() -> None:
    text = feed([b"hm</think>", b"Yes"], [], thinking=Thinking(begun=True))
    assert (text.text, text.thinking) == ("Yes", "hm")


def test_a_block_is_taken_off_the_beginning_only() -> None:
    text = feed([b"Yes <think>hm</think>"], [], thinking=Thinking())
    assert (text.text, text.thinking) == ("Yes <think>hm</think>", None)
    off = feed([b"<think>hm</think>"], [], thinking=Thinking(on=False))
    assert (off.text, off.thinking) == ("<think>hm</think>", None)


@pytest.mark.parametrize("end", ["eos", "length", "interrupted"])
def test_an_unfinished_thinking_block_is_an_empty_answer(end: str) -> None:
    text = Text(lambda _: b"<think>hm </thi", limit=1 if end == "length" else 9, eos={EOS}, thinking=Thinking())
    piece = text.push([1])
    piece += text.push([EOS]) if end == "eos" else text.interrupt() if end == "interrupted" else ""
    assert (piece, text.text, text.thinking, text.stop_reason) == ("", "", "hm </thi", end)


def test_a_stop_string_is_searched_in_the_answer_alone() -> None:
    text = feed([b"<think>a END</think>b", b" EN", b"D c"], [], stops=["END"], thinking=Thinking())
    assert (text.text, text.thinking, text.stop_reason) == ("b ", "a END", "stop")
    held = feed([b"<thi"], [], stops=["th"], limit=1, thinking=Thinking())
    assert (held.text, held.stop_reason) == ("<", "stop")


THOUGHTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "a", "é", "世", "ab"]), max_size=20
).map("".join)


def thought_and_answer(text: str, *, begun: bool) -> tuple[str | None, str]:
    """Splits the whole text at once."""
    opening = re.match(r"\s*<think>", text)
    if not begun and opening is None:
        return None, text
    thought, _, answer = text[0 if begun or opening is None else opening.end() :].partition("</think>")
    return thought.strip("\n"), answer.lstrip("\n")


@given(
    THOUGHTS, st.booleans(), STOPS, st.lists(st.integers(1, 4), max_size=40), st.lists(st.integers(1, 17), max_size=20)
)
def test_thinking_and_answer_depend_on_the_tokens_alone(
    words: str, begun: bool, stops: list[str], token_sizes: list[int], rounds: list[int]
) -> None:
    tokens, thinking = chopped(words.encode(), token_sizes), Thinking(begun=begun)
    text = feed(tokens, rounds, stops=stops, thinking=thinking)
    singly = feed(tokens, [], stops=stops, thinking=thinking)
    assert (text.text, text.tokens, text.stop_reason) == (singly.text, singly.tokens, singly.stop_reason)
    # The same holds in the middle of the stream.
    some = feed(tokens[: sum(rounds[:2])], rounds[:2], stops=stops, thinking=thinking)
    assert some.text == feed(tokens[: sum(rounds[:2])], [], stops=stops, thinking=thinking).text
    text.interrupt()
    thought, answer = thought_and_answer(words, begun=begun)
    assert text.text == "".join(text.pieces) == oracle(answer, stops)
    if text.stop_reason != "stop":
        assert text.thinking == thought


def test_a_text_with_a_reason_is_complete() -> None:
    """Another thread reads the reason first, then the text."""

    class Pieces(list[str]):
        def append(self, piece: str) -> None:
            assert text.stop_reason is None
            super().append(piece)

    for end in ("eos", "length", "interrupted"):
        text = Text(lambda _: b"x", limit=2, eos={EOS}, stops=["xxx"])
        text.pieces = Pieces()
        text.push([1])
        if end == "interrupted":
            text.interrupt()
        else:
            text.push([EOS if end == "eos" else 1])
        assert (text.stop_reason, len(text.text)) == (end, len(text.tokens))
