"""The hash of an answer covers every option that the answer depends on, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quantspec_cli.fingerprint import of_answer
from quantspec_cli.options import EngineOptions, GenerateOptions

# A value other than the default of every option of the engine, and the options that it needs.
ENGINE: dict[str, tuple[Any, dict[str, Any]]] = {
    "device": ("cuda", {}),
    "threads": (3, {}),
    "method": ("w4", {}),
    "weights": ("int8", {}),
    "kv_target": ("int4", {}),
    "kv_rounding": ("paper", {}),
    "draft_weights": ("none", {}),
    "draft_precision": ("down", {}),
    "draft_pages": (4, {}),
    "page_choice": ("window", {}),
    "draft_refresh": (2, {"method": "snapkv"}),
    "draft_model": ("demo", {"method": "auto"}),
    "draft_model_kv": ("fp16", {"method": "draft-model", "draft_model": "demo"}),
    "accept": ("rejection", {}),
    "gamma": (3, {}),
}
GENERATE: dict[str, Any] = {
    "max_new_tokens": 5,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "no_repeat_ngram": 5,
    "seed": 1,
    "stop": ("x",),
    "ignore_eos": True,
    "logprobs": 2,
    "json_schema": {"type": "object"},
}
TARGET = {"weights", "kv_target", "kv_rounding"}
NEVER = {"device", "threads"}


def test_every_option_is_listed_here() -> None:
    assert ENGINE.keys() == EngineOptions.__dataclass_fields__.keys()
    assert {*GENERATE, "shortens"} == GenerateOptions.__dataclass_fields__.keys()


@pytest.mark.parametrize("name", ENGINE)
def test_options_of_the_engine(name: str) -> None:
    value, needed = ENGINE[name]

    def changes(sampling: GenerateOptions, **options: Any) -> bool:
        before = EngineOptions(**needed, **options)
        return of_answer("m", before, sampling) != of_answer("m", replace(before, **{name: value}), sampling)

    sampled = GenerateOptions(temperature=1.0)
    assert changes(GenerateOptions()) is (name in TARGET)
    # By rejection the drafts are part of the text.
    if name == "accept":
        assert changes(sampled)
    else:
        assert changes(sampled) is (name in TARGET)
        assert changes(sampled, accept="rejection") is (name not in NEVER)


@pytest.mark.parametrize("name", GENERATE)
def test_options_of_a_text(name: str) -> None:
    plain, changed = GenerateOptions(), GenerateOptions(**{name: GENERATE[name]})
    assert of_answer("m", EngineOptions(), plain) != of_answer("m", EngineOptions(), changed)


def test_a_default_is_the_same_as_its_value() -> None:
    plain, default = GenerateOptions(), GenerateOptions(shortens=True)
    assert of_answer("m", EngineOptions(), plain) == of_answer("m", EngineOptions(), default)
