#!/usr/bin/env python3
"""Show every round of an answer: what was drafted, what was accepted, and how the target ranks a rejected token.

    python tools/rounds.py FILE [-m MODEL] [--instruction TEXT] [-n 64] [--method quantspec] [--gamma N] [--temperature T]

A line is a round. Probabilities are those of the target after the accepted tokens, before temperature and noise:

    17  2 of 4 accepted  ' is' ' the' | drafted ' lease' 0.310 (rank 2), target ' house' 0.380

Under greedy decoding the target's token has rank 1. With a temperature the noise of the position decides, which draft and
target share.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from program import Parser

from quantspec_cli import _native, prompts
from quantspec_cli.errors import QuantspecError, native_errors
from quantspec_cli.model import Model
from quantspec_cli.options import LOGPROBS_MAX, EngineOptions, GenerateOptions

# A token's log-probability, and (token, log-probability) of the most likely ones.
TokenLogprob = tuple[float, list[tuple[int, float]]]


def described(drafted: list[int], tokens: list[int], logprobs: list[TokenLogprob], word: Callable[[int], str]) -> str:
    """A round: `tokens` are the accepted ones of `drafted`, and the target's."""
    accepted = len(tokens) - 1
    logprob, top = logprobs[accepted]
    parts = [f"target {word(tokens[accepted])} {math.exp(logprob):.3f}"]
    if accepted < len(drafted):
        token = drafted[accepted]
        ranks = {other: f"{math.exp(of):.3f} (rank {rank})" for rank, (other, of) in enumerate(top, 1)}
        parts.insert(0, f"drafted {word(token)} {ranks.get(token, f'(rank above {len(top)})')}")
    words = "".join(f" {word(token)}" for token in drafted[:accepted])
    draft = f"{accepted} of {len(drafted)} accepted {words}" if drafted else "no draft"
    return f"{draft} | {', '.join(parts)}"


def show(asked: argparse.Namespace) -> None:
    """Decodes the document and prints each round."""
    gamma: int | Literal["auto"] = "auto" if asked.gamma is None else asked.gamma
    options = EngineOptions(method=asked.method, gamma=gamma, draft_model=asked.draft_model)
    sampling = GenerateOptions(
        max_new_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.seed, logprobs=LOGPROBS_MAX
    ).sampling()
    (document,) = prompts.read_all([asked.file], [])
    model = Model.open(asked.model, draft_model=asked.draft_model)
    prompt = model.prompt(document.text, instruction=asked.instruction).ids
    context = model.resolve_context(len(prompt) + asked.max_tokens)

    def word(token: int) -> str:
        return repr(model.tokenizer.token_bytes(token).decode(errors="replace"))

    with native_errors():
        draft_model = model.draft_model(options.draft_model)
        engine = _native.Engine(str(model.directory), capacity=context, draft_model=draft_model, **options.native())
        slot = engine.add(prompt, **sampling)
        tokens, number, left = [engine.prefill(slot)], 0, asked.max_tokens - 1
        engine.take_logprobs(slot)
        while left > 0 and not set(tokens) & model.eos:
            engine.draft([(slot, engine.choose_gamma(slot))])
            ((_, tokens, drafted),) = engine.verify_with_drafts()
            number, left = number + 1, left - len(tokens)
            print(f"{number:3}  {described(drafted, tokens, engine.take_logprobs(slot), word)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the document")
    parser.add_argument("-m", "--model", help="default: the demo model")
    parser.add_argument("--instruction", help="for a model with a chat template; without it the document is continued")
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("--method", default="quantspec")
    parser.add_argument("--draft-model", help="for the method draft-model: a checkpoint with the same tokenizer")
    parser.add_argument("--gamma", type=int, help="default: as measured")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    try:
        show(parser.parse_args(argv))
    except QuantspecError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
