"""Defaults for replies of instruct models: recommended sampling and penalties, room for an answer, a note if it was cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import render, template
from .errors import ModelError, UsageError
from .options import MAX_NEW_TOKENS, MAX_REPLY_TOKENS, MAX_THOUGHTFUL_TOKENS, GenerateOptions, shown
from .schema import is_complete
from .tokenizer import read_json

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from .generation import Generation
    from .model import Model, Prompt


# Length of a repetition, in tokens, that marks a looping text: longer than phrases that a good answer repeats.
_LOOP_TOKENS = 12
# Keys of generation_config.json that are options here: sampling, and penalties by their names here.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = {"repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram"}
# Sampling that greedy text ignores.
_IDLE_IF_GREEDY = ("top_k", "top_p", "min_p")
# Keys that change a text and are not supported, each with the value that has no effect; and those of sampled texts alone.
_UNSUPPORTED = {
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": [],
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "encoder_repetition_penalty": 1,
    "watermarking_config": None,
    "dola_layers": None,
}
_UNSUPPORTED_SAMPLING = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None}
# Models of fewer weights tend to repeat a sentence until -n. With these penalties SmolLM2-135M-Instruct ends its summaries;
# long answers of larger models would suffer.
_SMALL_WEIGHTS = 1e9
_OF_SMALL = {"repetition_penalty": 1.05, "frequency_penalty": 0.6}
_ALL_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram")


@dataclass(frozen=True)
class Recommended:
    """Recommendations of generation_config.json.

    Attributes:
        sampling: options of `GenerateOptions`; empty if the file recommends no sampling, or is missing.
        penalties: penalties for sampled and for greedy texts; empty if the file recommends none.
        stop: stop strings.
        unsupported: names of settings that have an effect and are not supported.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    penalties: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    @classmethod
    def read(cls, directory: Path) -> Recommended:
        """Reads the file of a checkpoint."""
        path = directory / "generation_config.json"
        found = {name: value for name, value in read_json(path).items() if value is not None}
        hint = f"correct {path}, or remove it"
        if found.get("top_k") == -1:  # all tokens, as vLLM spells it
            found["top_k"] = 0
        samples = found.get("do_sample", False)
        if not isinstance(samples, bool):
            raise ModelError(f"{path}: do_sample is {shown(samples):.60}", hint)

        def checked(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
            options: dict[str, Any] = {}
            for key, name in names.items():
                if key in values:
                    try:
                        options[name] = getattr(GenerateOptions(**{name: values[key]}), name)
                    except UsageError as error:
                        message = error.message.replace(name, key, 1)
                        raise ModelError(f"{path}: {message}", f"{error.hint}; or remove the file") from error
            return options

        # Without a temperature, sampling uses 1.
        sampling = checked({name: name for name in _SAMPLING}, {"temperature": 1.0, **found}) if samples else {}
        penalties = checked(_PENALTIES, found)
        others = _UNSUPPORTED | (_UNSUPPORTED_SAMPLING if samples else {})
        return cls(
            sampling,
            {name: value for name, value in penalties.items() if value != _default(name)},
            checked({"stop_strings": "stop"}, found).get("stop", ()),
            tuple(name for name, neutral in others.items() if found.get(name, neutral) != neutral),
        )


def resolve_defaults(
    model: Model,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    *,
    unset: Container[str],
    arguments: Mapping[str, Any],
) -> tuple[GenerateOptions, list[str]]:
    """Sets options that no flag, variable or setting gave (`unset` names their parameters).

    Returns the options, and notes about the choices. `arguments` are those of the chat template.
    """
    chosen: dict[str, Any] = {}
    notes: list[str] = []
    replies = any(not prompt.continues for prompt in prompts)
    thinks = {prompt.thinking.on for prompt in prompts if prompt.thinking is not None}
    if replies:
        if False in thinks and template.THINKING not in arguments:
            notes.append("thinking is off; --thinking on has the model think before it answers")
        chosen, of_replies = _defaults_of_replies(model, options, unset)
        notes += of_replies
    if "max_tokens" in unset:
        usual = MAX_THOUGHTFUL_TOKENS if True in thinks else MAX_REPLY_TOKENS if replies else MAX_NEW_TOKENS
        # The default never makes a prompt too long.
        chosen |= {"max_new_tokens": usual, "shortens": True}
    options = replace(options, **chosen)
    idle = [f"--{_flag(name)}" for name in _IDLE_IF_GREEDY if name not in unset and _differs(name, options)]
    if options.temperature == 0 and idle:
        notes.append(f"no effect: {', '.join(idle)}, as temperature 0 is greedy; --temperature 1 samples")
    return options, notes


def _defaults_of_replies(
    model: Model, options: GenerateOptions, unset: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """Sampling, penalties and stop strings that nothing set, by generation_config.json or for small models; and notes."""
    recommended = model.recommended
    chosen: dict[str, Any] = {}
    notes: list[str] = []
    if "temperature" in unset or options.temperature > 0:
        chosen = {name: value for name, value in recommended.sampling.items() if name in unset}
    changed = {name: value for name, value in chosen.items() if name == "temperature" or value != _default(name)}
    if changed:
        notes.append(f"sampling from generation_config.json: {_listed(changed)}; --temperature 0 is greedy")
    penalties = {name: value for name, value in recommended.penalties.items() if name in unset}
    if penalties:
        off = " ".join(f"--{_flag(name)} {_default(name):g}" for name in penalties)
        turn = "turns" if len(penalties) == 1 else "turn"
        notes.append(f"penalties from generation_config.json: {_listed(penalties)}; {off} {turn} them off")
    elif _needs_penalties(model, options, unset):
        penalties = _OF_SMALL
        notes.append(
            f"penalties of small models without recommended sampling: {_listed(penalties)}; "
            "--repetition-penalty 1 turns them off"
        )
    chosen |= penalties
    # They would cut JSON, which may contain them.
    if recommended.stop and "stop" in unset and not options.ignore_eos and options.json_schema is None:
        chosen["stop"] = recommended.stop
        listed = ", ".join(map(repr, recommended.stop))
        notes.append(f"stop strings from generation_config.json: {listed:.200}; --stop replaces them")
    if recommended.unsupported:
        notes.append(f"not supported in generation_config.json: {', '.join(recommended.unsupported)}")
    return chosen, notes


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _default(name: str) -> Any:
    return getattr(GenerateOptions, name)


def _differs(name: str, options: GenerateOptions) -> bool:
    return bool(getattr(options, name) != _default(name))


def _listed(values: Mapping[str, float]) -> str:
    """Options and their values, for a note."""
    return ", ".join(f"{_flag(name)} {value:g}" for name, value in values.items())


def _needs_penalties(model: Model, options: GenerateOptions, unset: Container[str]) -> bool:
    """Whether replies would repeat themselves: neither flags nor checkpoint say how to choose tokens, and the model is small.

    JSON is left alone: its quotes and commas have to repeat.
    """
    recommended = model.recommended
    if recommended.sampling or recommended.penalties or options.json_schema is not None:
        return False
    return all(name in unset for name in _ALL_PENALTIES) and _weights(model.info) < _SMALL_WEIGHTS


def _weights(info: Mapping[str, Any]) -> int:
    """Number of weights of a model, without norms, biases and a separate head."""
    width = (2 * info["heads"] + 2 * info["kv_heads"]) * info["head_dim"] + 3 * info["intermediate"]
    return int(info["hidden"] * (info["vocab"] + info["layers"] * width))


def truncation_notes(
    names: Sequence[str],
    prompts: Sequence[Prompt],
    answers: Sequence[Generation],
    options: GenerateOptions,
    *,
    context: int,
    longest: int,
) -> Iterator[str]:
    """Notes about replies that the token limit cut, and answers by a JSON schema that it or a stop string cut. `context`:
    most tokens of a prompt and its answer; `longest`: the model's.
    """
    schema = options.json_schema is not None
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        if schema and is_complete(answer.text):
            continue
        if schema and answer.stop_reason == "stop":
            yield f"{name}: the answer was cut at a string of --stop, so its JSON is incomplete"
        if (prompt.continues and not schema) or answer.stop_reason != "length":
            continue
        limit, more = "-n", "raise -n"
        if options.new_tokens(len(prompt.ids), context) < options.max_new_tokens:
            limit, more = "the end of the context", "raise -c" if context < longest else "shorten the document"
        where = f"{name}: the answer was cut at {render.count(len(answer.tokens), 'token')} ({limit})"
        if schema:
            where += f", so its JSON is incomplete: {more}, or bound strings and lists in the schema"
            yield where
            continue
        if _repeats(answer.tokens):
            where += ", and repeats itself: try --repetition-penalty 1.05 --frequency-penalty 0.6"
        elif answer.thinks:
            where += f", inside its thinking block: {more}"
        yield where


def _repeats(tokens: Sequence[int]) -> bool:
    """True if the last `_LOOP_TOKENS` tokens occur three times in the answer."""
    last = list(tokens[-_LOOP_TOKENS:])
    places = range(len(tokens) - _LOOP_TOKENS + 1)
    return sum(tokens[at] == last[0] and list(tokens[at : at + _LOOP_TOKENS]) == last for at in places) >= 3
