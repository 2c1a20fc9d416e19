"""Answers that follow a JSON schema: drafters change no token, complete answers are valid, bad schemas are one error
line."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import DEMO, Outcome, chat_model
from tokenizers import Tokenizer

from quantspec_cli import Engine, schema
from quantspec_cli.errors import InputError, UsageError
from quantspec_cli.model import Model
from quantspec_cli.options import GenerateOptions

Run = Callable[..., Outcome]

STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "mood": {"enum": ["happy", "sad", None, 3]},
        "days": {"type": "integer", "minimum": 1, "maximum": 365},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "names": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
            "minItems": 1,
            "maxItems": 3,
        },
        "day": {"type": "string", "format": "date"},
        "dog": {"$ref": "#/$defs/dog"},
    },
    "required": ["title", "mood", "days", "names", "dog"],
    "additionalProperties": False,
    "$defs": {
        "dog": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"old": {"type": "boolean"}},
                    "required": ["old"],
                    "additionalProperties": False,
                },
            ]
        }
    },
}
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 4, "maxItems": 9}
TEXTS = [
    "Once upon a time there was a dog.",
    "The sun was hot, and Tom had one ball. Tom said:",
    '{"title": "A day"}\n' * 6,
]


@pytest.mark.slow
@pytest.mark.parametrize("of", [STORY, DIGITS], ids=["object", "array"])
def test_what_drafts_changes_no_token_and_answers_are_valid(of: dict[str, Any]) -> None:
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}, {"frequency_penalty": 0.5}]
    plain: list[list[Any]] = []
    with Engine.load(context=1200, method="ar") as engine:
        for setting in settings:
            plain.append([engine.generate(text, max_new_tokens=600, json_schema=of, **setting) for text in TEXTS])
        # Without the schema, a forbidden token is chosen.
        for text, masked in zip(TEXTS, plain[0], strict=True):
            assert engine.generate(text, max_new_tokens=len(masked.tokens)).tokens != masked.tokens
    for answer in itertools.chain(*plain):
        assert answer.stop_reason == "eos", answer.text
        jsonschema.validate(json.loads(answer.text), of, format_checker=jsonschema.FormatChecker())
    # Which settings each method decodes with: masks do not depend on how a draft computes its tokens.
    drafts: list[tuple[str, Any, list[int]]] = [
        ("quantspec", 4, [0, 1, 2]),
        ("quantspec", "auto", [0]),
        ("w4", 12, [1]),
        ("ngram", 5, [2]),
        ("quantspec+ngram", 7, [1]),
    ]
    for method, gamma, chosen in drafts:
        with Engine.load(context=1200, method=method, gamma=gamma, batch=3, threads=2) as engine:
            for index in chosen:
                found = engine.generate_batch(TEXTS, max_new_tokens=600, json_schema=of, **settings[index])
                assert found == plain[index], (method, settings[index])
            assert engine.statistics()["drafted_tokens"] > 0


@pytest.mark.slow
def test_a_draft_model_drafts_by_the_schema_too() -> None:
    from conftest import DEMO

    with Engine.load(context=500, method="ar") as engine:
        want = engine.generate(TEXTS[0], max_new_tokens=400, json_schema=STORY)
    with Engine.load(context=500, method="draft-model", draft_model=str(DEMO), gamma=4) as engine:
        assert engine.generate(TEXTS[0], max_new_tokens=400, json_schema=STORY) == want
        # The same model with the same masks: drafts differ from the target by rounding only.
        rate = engine.statistics()["acceptance_rate"]
        assert rate is not None
        assert rate > 0.9


def test_masked_and_free_answers_decode_together() -> None:
    with Engine.load(context=500, method="ar") as engine:
        free = engine.generate(TEXTS[1], max_new_tokens=100)
        masked = engine.generate(TEXTS[1], max_new_tokens=100, json_schema=DIGITS, logprobs=2)
    with Engine.load(context=500, gamma=5, batch=2) as engine:
        streams = [
            engine.stream(TEXTS[1], max_new_tokens=100),
            engine.stream(TEXTS[1], max_new_tokens=100, json_schema=DIGITS, logprobs=2),
        ]
        for stream in streams:
            list(stream)
        assert [stream.generation for stream in streams] == [free, masked]
    # Log-probabilities are computed before masks, so the most likely token need not be the chosen one.
    assert masked.logprobs is not None
    assert any(one.id != one.top[0][0] for one in masked.logprobs)
    assert masked.text != free.text


def test_another_thread_may_bring_another_schema() -> None:
    class Cleared(dict[str, schema.Grammar]):
        """As if another thread cleared it immediately."""

        def __setitem__(self, *_: Any) -> None:
            self.clear()

    assert replace(Model.open(), _grammars=Cleared()).grammar(DIGITS).begin() is not None


def test_masks_after_drafts_are_those_of_the_text() -> None:
    model = Model.open()
    grammar = model.grammar(STORY)
    tokens = range(len(model.tokenizer.vocabulary()[0]))
    chance = random.Random(5)
    for _ in range(4):
        walked, text = grammar.begin(), list[int]()
        for _ in range(60):
            mask = walked.mask([])
            assert mask is not None
            fresh = grammar.begin()
            fresh.advance(text)
            assert fresh.mask([]) == mask, text
            allowed = [token for token in tokens if mask[token // 8] >> token % 8 & 1]
            # A walk of drafted tokens, the last of which may be forbidden, leaves no state.
            drafted: list[int] = []
            while len(drafted) < 4 and (after := walked.mask(drafted)) is not None:
                drafted.append(
                    chance.choice([t for t in tokens if after[t // 8] >> t % 8 & 1] + [chance.choice(tokens)] * 2)
                )
            assert walked.mask([]) == mask
            token = chance.choice(allowed)
            walked.advance([token])
            text.append(token)
            if token in model.eos:
                break
        if text[-1] in model.eos:
            jsonschema.validate(json.loads(b"".join(map(model.tokenizer.token_bytes, text))), STORY)
            assert walked.mask([]) is None


@pytest.mark.slow
def test_what_a_draft_makes_too_hard_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(context=500, gamma=4, batch=2) as engine:
        want = engine.generate_batch(TEXTS[:2], max_new_tokens=100, json_schema=DIGITS)
        honest = schema.Answer.mask

        def mask(self: schema.Answer, drafted: Sequence[int]) -> bytes | None:
            if len(drafted) == 2:
                raise InputError("the JSON schema takes too much work", "simplify the schema")
            return honest(self, drafted)

        monkeypatch.setattr(schema.Answer, "mask", mask)
        assert engine.generate_batch(TEXTS[:2], max_new_tokens=100, json_schema=DIGITS) == want

        def ends(self: schema.Answer, drafted: Sequence[int]) -> bytes | None:
            if len(self._tokens) + len(drafted) > 6:
                raise InputError("the JSON schema takes too much work", "simplify the schema")
            return honest(self, drafted)

        monkeypatch.setattr(schema.Answer, "mask", ends)
        # The error ends this answer only.
        stream = engine.stream(TEXTS[0], max_new_tokens=100)
        with pytest.raises(InputError, match="too much work"):
            engine.generate(TEXTS[0], max_new_tokens=100, json_schema=DIGITS)
        assert sum(map(len, stream)) > 20

        def fails(self: schema.Answer, drafted: Sequence[int]) -> bytes | None:
            raise ZeroDivisionError

        monkeypatch.setattr(schema.Answer, "mask", fails)
        with pytest.raises(ZeroDivisionError):
            engine.generate(TEXTS[0], max_new_tokens=100, json_schema=DIGITS)
        monkeypatch.undo()
        assert engine.generate_batch(TEXTS[:2], max_new_tokens=100, json_schema=DIGITS) == want


def test_a_matcher_that_gives_up_is_made_anew() -> None:
    class Matcher:
        """Takes any tokens; a 9 breaks it."""

        def __init__(self) -> None:
            self.tokens: list[int] = []

        def deep_copy(self) -> Matcher:
            return Matcher()

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.tokens += tokens
            return len(tokens)

        def rollback(self, count: int) -> None:
            self.tokens = self.tokens[: len(self.tokens) - count]

        def is_error(self) -> bool:
            return 9 in self.tokens

        def get_error(self) -> str:
            return "step limit reached\n<state>\nmuch more"

        def compute_bitmask(self) -> bytes:
            return bytes(self.tokens)

    answer = schema.Answer(Matcher(), {2})  # type: ignore[arg-type]
    answer.advance([5, 6])
    assert answer.mask([7]) == bytes([5, 6, 7])
    with pytest.raises(InputError, match=r"after 2 tokens: step limit reached \("):
        answer.mask([7, 9])
    assert answer.mask([8]) == bytes([5, 6, 8])
    answer.advance([8, 2, 9])
    assert answer.mask([]) is answer.mask([1]) is None


@pytest.mark.slow
def test_run_answers_by_the_schema_and_notes_a_cut(quantspec: Run, tmp_path: Path) -> None:
    place = tmp_path / "story.json"
    place.write_text(json.dumps(STORY), encoding="utf-8-sig")
    arguments = ["run", "--text", TEXTS[0], "--json-schema", str(place)]
    outcome = quantspec(*arguments)
    assert outcome.code == 0
    jsonschema.validate(json.loads(outcome.stdout), STORY)
    assert "incomplete" not in outcome.stderr
    report = quantspec(*arguments, "--json").json
    assert report["json_schema"] == STORY
    assert report["results"][0]["stop_reason"] == "eos"
    assert quantspec(*arguments, "--method", "ngram", "-q").stdout == outcome.stdout
    cut = quantspec(*arguments, "-n", "9")
    assert cut.code == 0
    assert "cut at 9 tokens (-n), so its JSON is incomplete" in cut.stderr
    assert quantspec(*arguments, "-n", "9", "--json").json["results"][0]["stop_reason"] == "length"
    # The last token of complete JSON may be the last one allowed.
    place.write_text('{"type": "boolean"}')
    length = quantspec(*arguments, "--json").json["results"][0]["new_tokens"]
    ended = quantspec(*arguments, "-n", str(length))
    assert json.loads(ended.stdout) in (True, False)
    assert "cut" not in ended.stderr
    place.write_text(json.dumps(STORY))
    stopped = quantspec(*arguments, "--stop", ":")
    assert (stopped.code, ":" in stopped.stdout) == (0, False)
    assert "cut at a string of --stop, so its JSON is incomplete" in stopped.stderr
    model = chat_model(tmp_path / "m", "{{ messages[0].content }}", {"stop_strings": [":"]})
    whole = quantspec(*arguments, "-m", model, "--instruction", "Tell.").stdout
    jsonschema.validate(json.loads(whole), STORY)


@pytest.mark.slow
def test_batch_answers_by_the_schema_and_resumes_with_an_equal_one(quantspec: Run, tmp_path: Path) -> None:
    place, documents = tmp_path / "digits.json", tmp_path / "in"
    documents.mkdir()
    for number, text in enumerate(TEXTS):
        (documents / f"{number}.txt").write_text(text)
    place.write_text(json.dumps(DIGITS))
    arguments = [
        "batch",
        str(documents),
        "--out",
        str(tmp_path / "out"),
        "--suffix",
        ".json",
        "--json-schema",
        str(place),
    ]
    assert quantspec(*arguments).code == 0
    for number in range(len(TEXTS)):
        jsonschema.validate(json.loads((tmp_path / "out" / f"{number}.txt.json").read_text()), DIGITS)
    assert quantspec(*arguments, "--json").json["skipped"] == len(TEXTS)
    # Formatting of the schema does not matter; its content does.
    place.write_text(json.dumps(DIGITS, indent=2))
    assert quantspec(*arguments, "--json").json["skipped"] == len(TEXTS)
    place.write_text(json.dumps({**DIGITS, "minItems": 5}))
    assert quantspec(*arguments, "--json").json["done"] == len(TEXTS)
    cut = quantspec(*arguments, "-n", "2").stderr
    assert '3 answers were cut at 2 tokens (-n), so JSON is incomplete: stop_reason "length" in' in cut
    stopped = quantspec(*arguments, "--stop", ",").stderr
    assert "3 answers were cut at 256 tokens (-n) or a string of --stop, so JSON is incomplete: stop_reason" in stopped


BAD = {
    "a list": ([1], "no object"),
    "true": (True, "no object"),
    "a type nobody knows": ({"type": "text"}, "Invalid type: text"),
    "a keyword that is not supported": ({"not": {"type": "string"}}, "not"),
    "if and then": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "a reference to the network": ({"$ref": "http://example.org/s.json"}, "http://example.org"),
    "a reference to nothing": ({"$ref": "#/$defs/nothing"}, "/$defs/nothing"),
    "itself": ({"$ref": "#"}, "no text satisfies it"),
    "without end": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["b"], "additionalProperties": False},
        "unsatisfiable",
    ),
    "unsatisfiable": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
    "no choice": ({"enum": []}, "empty"),
    "a pattern that does not parse": ({"type": "string", "pattern": "("}, "unclosed group"),
    "a look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    "an unknown format": ({"type": "string", "format": "colour"}, "colour"),
    "a negative length": ({"type": "string", "minLength": -1}, "-1"),
    "a multiple of nothing": ({"type": "integer", "multipleOf": 0}, "multiple"),
    "an integer of 54 bits": ({"enum": ["a", {"b": [2**53 + 1]}]}, "constant 9007199254740993"),
    "a number beyond floats": ({"const": 10**400}, "2**53"),
    "alternatives that overlap": ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}, "oneOf overlap"),
    "many choices": ({"enum": [f"v{n}" for n in range(200_000)]}, "too big"),
}


@pytest.mark.parametrize("name", BAD)
def test_schemas_that_cannot_be_used(name: str, quantspec: Run, tmp_path: Path) -> None:
    bad, words = BAD[name]
    place = tmp_path / "schema.json"
    place.write_text(json.dumps(bad))
    outcome = quantspec("run", "--text", "A", "--json-schema", str(place))
    outcome.assert_error(2, words)
    assert len(outcome.stderr) < 800


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "so that some JSON satisfies it"),
        ({"enum": []}, "so that some JSON satisfies it"),
        ({"type": "string", "pattern": "a" * 400 + "("}, "correct the pattern"),
        ({"type": "string", "pattern": "\\bword"}, "word boundaries"),
        ({"type": "string", "pattern": "b", "format": "date"}, "so that some JSON satisfies it"),
        ({"type": "string", "minLength": 2**32}, "use at most 4294967295"),
        ({"type": "string", "minLength": -1}, "correct that value"),
        ({"type": "text"}, "correct that value"),
        ({"oneOf": [{}, {}]}, "exclude each other"),
        ({"$ref": "other.json"}, "in the same file"),
        ({"not": {}}, "omit the others"),
    ],
    ids=str,
)
def test_the_hint_fits_the_schema(bad: dict[str, Any], words: str) -> None:
    """Messages quote no regex: some of them are the library's own."""
    with pytest.raises(UsageError) as raised:
        Model.open(None).grammar(bad)
    assert words in raised.value.hint
    assert not re.search(r"regex|Regex|\(\?s|aaaa", raised.value.message)


def test_schemas_that_are_as_deep_as_a_stack(quantspec: Run, tmp_path: Path) -> None:
    place = tmp_path / "schema.json"
    for depth, words in (200, "recursion"), (900, "recursion"), (3_000, "too deeply"), (100_000, "too deeply"):
        place.write_text('{"type":"array","items":' * depth + "{}" + "}" * depth)
        quantspec("run", "--text", "A", "--json-schema", str(place)).assert_error(2, "JSON schema", words)
    place.write_text('{"const": ' + "1" * 5_000 + "}")
    quantspec("run", "--text", "A", "--json-schema", str(place)).assert_error(2, "thousands of digits", "smaller")
    place.write_text(json.dumps({"type": "string", "pattern": "(" * 5_000 + "a" + ")" * 5_000}))
    quantspec("run", "--text", "A", "--json-schema", str(place)).assert_error(2, "nested parentheses")


def test_files_that_hold_no_schema(quantspec: Run, tmp_path: Path) -> None:
    def refused(content: bytes | None, *words: str) -> None:
        place = tmp_path / "schema.json"
        if content is not None:
            place.write_bytes(content)
        for command in (["run", "--text", "A"], ["batch", str(tmp_path), "--out", str(tmp_path / "out")]):
            quantspec(*command, "--json-schema", str(place)).assert_error(2, *words)

    refused(None, "schema.json does not exist")
    refused(b"", "not valid JSON")
    refused(b'{"type": ', "not valid JSON")
    refused(b'{"const": NaN}', "not valid JSON")
    refused(b"\xff\xfe{}", "not UTF-8 at byte 0")
    refused(b'"text"', "no object")
    quantspec("run", "--text", "A", "--json-schema", str(tmp_path)).assert_error(2, "is not a file")
    quantspec("run", "--text", "A", "--json-schema", "").assert_error(2, "'' is not a file")
    assert not (tmp_path / "out").exists()


def test_tags_of_the_tokenizer_alone_leave_room_for_a_schema(fake: Any, tmp_path: Path) -> None:
    # As Qwen3-4B-Instruct-2507, which never thinks, and has no switch.
    folder = Path(chat_model(tmp_path / "m", "{{ messages[0].content }}"))
    inner = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    inner.add_tokens(["<think>", "</think>"])
    (folder / "tokenizer.json").unlink()
    inner.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 8200}))
    model = Model.open(str(folder))
    prompt = model.prompt("D", instruction="I")
    assert prompt.thinking is not None
    assert prompt.thinking.on
    schema.check(model, [prompt], json.dumps(DIGITS))
    always = Model.open(chat_model(tmp_path / "always", "{{ messages[0].content }}<think>"))
    with pytest.raises(UsageError, match="no room for a thinking block"):
        schema.check(always, [always.prompt("D", instruction="I")], json.dumps(DIGITS))


def test_options_that_contradict_a_schema(quantspec: Run, fake: Any, tmp_path: Path) -> None:
    place = tmp_path / "schema.json"
    place.write_text(json.dumps(DIGITS))
    quantspec("run", "--text", "A", "--json-schema", str(place), "--ignore-eos").assert_error(2, "--ignore-eos is True")
    thinker = chat_model(tmp_path / "m", "{{ messages[0].content }}{% if enable_thinking %}{% endif %}</think>")
    arguments = [
        "run",
        "-m",
        thinker,
        "--text",
        "D",
        "--instruction",
        "I",
        "--json-schema",
        str(place),
        "--thinking",
        "on",
    ]
    quantspec(*arguments).assert_error(2, "thinking")
    assert not fake.engines
    with pytest.raises(UsageError, match="not valid JSON"):
        GenerateOptions(json_schema={"const": object()})
    # A pydantic model is a class.
    with pytest.raises(UsageError, match="model_json_schema"):
        GenerateOptions(json_schema=type("Model", (), {}))
    with pytest.raises(UsageError, match="no object"):
        GenerateOptions(json_schema=3)
    looped: dict[str, Any] = {}
    looped["items"] = looped
    with pytest.raises(UsageError, match="Circular"):
        GenerateOptions(json_schema=looped)


def test_bans_that_leave_no_token_are_reported(quantspec: Run, tmp_path: Path) -> None:
    place = tmp_path / "schema.json"
    place.write_text(json.dumps({"type": "array", "items": {"const": 7}, "minItems": 40, "maxItems": 40}))
    arguments = ["run", "--text", "A", "--json-schema", str(place), "--no-repeat-ngram", "4"]
    for method in ("ar", "quantspec", "ngram"):
        outcome = quantspec(*arguments, "--method", method, "--json")
        error = outcome.json["error"]
        assert (outcome.code, error["kind"], error["exit_code"]) == (1, "input", 1)
        assert "no token is left to choose" in error["message"]
        assert "--no-repeat-ngram" in error["hint"]


def test_without_the_package(quantspec: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "schema.json"
    place.write_text(json.dumps(DIGITS))
    monkeypatch.setattr(schema, "find_spec", lambda _: None)
    outcome = quantspec("run", "--text", "A", "--json-schema", str(place))
    outcome.assert_error(2, "llguidance", 'pip install "quantspec[schema]"')


def test_tokenizers_that_cannot_write_json(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.open()
    tokens, special = model.tokenizer.vocabulary()
    without = [b"" if token == b"{" else token for token in tokens]
    monkeypatch.setattr(model.tokenizer, "vocabulary", lambda: (without, special))
    with pytest.raises(UsageError, match=r"no token for \{, so it cannot write every JSON"):
        model.grammar(DIGITS)
    other = Model.open()
    other.__dict__["eos"] = frozenset()
    with pytest.raises(UsageError, match="no token that ends a text"):
        other.grammar(DIGITS)


def test_a_space_before_a_word_is_no_part_of_what_a_schema_prescribes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.open()
    plain = model.tokenizer.encode_plain
    # As SentencePiece's tokenizers encode.
    monkeypatch.setattr(model.tokenizer, "encode_plain", lambda text: plain(" " + text))
    answer = model.grammar({"const": {"a": "b c"}}).begin()
    text = b""
    while (mask := answer.mask([])) is not None:
        token = next(token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1)
        text += model.tokenizer.token_bytes(token)
        answer.advance([token])
    assert json.loads(text) == {"a": "b c"}
