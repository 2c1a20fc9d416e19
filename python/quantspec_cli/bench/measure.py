"""The measurements of one model: prefill and decoding, each method in turn."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from .. import __version__, files, predict, render, settings
from ..errors import native_errors
from .answers import SAMPLING, Answers
from .grid import BASELINE, Arguments, Grid, Variant, engine_options, page_choice, quantises_cache, tests
from .samples import Sample, bandwidth_share, check_equal, speculation, speedup
from .work import Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..model import Model
    from ..options import EngineOptions

# Warm-up tokens per method and depth: page faults, and the processor's clock.
WARM_UP = 8
# Warm-up tokens of a prompt, for the same reason.
WARM_UP_PROMPT = 64


def is_widened(model: Model) -> bool:
    """Whether tools/widen.py made the model."""
    config = model.directory / "config.json"  # a GGUF file has none
    return files.is_file(config) and "widened" in json.loads(files.read(config))


class Bench:
    """The measurements of one model."""

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        grid: Grid,
        arguments: Arguments,
        options: EngineOptions,
        *,
        widened: bool,
        memory: dict[str, dict[str, Any]],
    ) -> None:
        """Loads the model, with what every method of the grid needs; records its memory in `memory`."""
        from .. import _native

        self._native = _native
        self._model, self._ids, self._grid, self._arguments = model, ids, grid, arguments
        self._draft_model = model.draft_model(arguments.draft_model, progress=render.on_terminal())
        with render.progress("loading weights", shown=True) as on_loading, native_errors():
            self._engine = _native.Engine(
                str(model.directory),
                **engine_options(grid, options, arguments.draft_model_kv),
                every_method=True,
                draft_model=self._draft_model,
                draft_cache=settings.native_draft_cache(),
                on_loading=on_loading,
            )
            memory[model.name] = self._engine.stats()
            self._work = Work(
                info=model.info,
                draft_weights_bytes=int(memory[model.name]["draft_weights_bytes"]),
                draft_model_kv=arguments.draft_model_kv,
                page_choice=arguments.page_choice,
            )
            self._weights, self._precision = self._engine.info["weights"], self._engine.info["draft_precision"]
        self._accept, self._kv_rounding = options.accept, options.kv_rounding
        self._info = self._engine.info
        render.note_of_drafts(self._info)
        render.note_of_emulation(variant.name for variant in grid.variants)
        self._bandwidth_now = 0.0
        self._widened = widened

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all measurements, as each depth completes."""
        for test in tests(self._grid, ragged=self._arguments.ragged):
            if test["test"] == "pp":
                yield self._prefill(test)
            else:
                yield from self._decode(test)

    def _bandwidth(self) -> float:
        """GB/s now, of the engine's device."""
        return self._engine.read_gb_per_s()

    def _prefill(self, test: Mapping[str, Any]) -> dict[str, Any]:
        """Cost of `n_prompt` more tokens of a prompt after `n_depth`: their share of the prefill of both."""
        depth, tokens, samples = test["n_depth"], test["n_prompt"], []
        read = self._prefill_bytes(depth, tokens)
        with render.progress(f"prefill {tokens} at {depth}", shown=True) as on_prefill, native_errors():
            slot = self._add(min(depth + tokens, WARM_UP_PROMPT))
            self._engine.prefill(slot)
            self._engine.finish(slot)
            for _ in range(self._arguments.repetitions):
                before = self._bandwidth()
                slot = self._add(depth + tokens)
                _, seconds = self._engine.prefill_timed(slot, depth, on_prefill)
                self._engine.finish(slot)
                samples.append(Sample(seconds, read, (before, self._bandwidth()), processed=tokens))
        row = self._row(samples, test)
        row["flops_per_token"] = sum(predict.prompt_flops(self._model.info, tokens, depth)) / tokens
        # Prefill is in full precision, so it does not depend on the decoding method.
        return row | {"method": "any", "kv_target": "any", "gamma": 0, "draft_pages": "all"}

    def _decode(self, test: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Decodes sequences together until the first has emitted `n_gen` tokens; each follows its own part of the text."""
        repetitions, variants = self._arguments.repetitions, self._grid.variants
        depth, tokens = test["n_depth"], test["n_gen"]
        with render.progress(f"reading {depth} tokens", shown=depth > 0) as on_prefill, native_errors():
            answers = Answers(
                *(self._engine, self._model, self._ids, depth, tokens),
                batch=test["batch"],
                ragged="ragged" in test,
                on_prefill=on_prefill,
            )
        traffic = self._traffic_of(answers)
        samples: dict[Variant, list[Sample]] = {variant: [] for variant in variants}
        with render.progress(f"decoding at {depth}", shown=True) as tick, native_errors():
            for variant in variants:
                self._configure(variant)
                answers.run(self._arguments.seed, min(WARM_UP, tokens))
            for repetition in range(repetitions):
                self._bandwidth_now = self._bandwidth()
                # In alternating direction, so that a drift of the machine affects all variants alike.
                for variant in variants[:: -1 if repetition % 2 else 1]:
                    samples[variant].append(self._sample(variant, answers, traffic, repetition))
                    if tick:
                        tick(sum(map(len, samples.values())), repetitions * len(variants))
                if self._accept == "replay":
                    check_equal({variant: runs[-1] for variant, runs in samples.items()})
        answers.close()
        for variant, runs in samples.items():
            row = self._row(runs, test) | {"warm_up": self._arguments.warm_up}
            row |= speculation(runs) | speedup(runs, samples.get(BASELINE))
            row["flops_per_token"] = statistics.fmean(self._work.flops(variant, of_one, runs) for of_one in traffic)
            yield row | self._settings(variant)

    def _settings(self, variant: Variant) -> dict[str, Any]:
        """The settings that a variant reads, as fields of its rows."""
        arguments, method = self._arguments, variant.method
        found: dict[str, Any] = {
            "method": variant.name,
            "kv_target": variant.kv_target,
            "gamma": variant.gamma,
            "draft_pages": variant.draft_pages,
        }
        if variant.draft_pages != "all":
            found["page_choice"] = page_choice(arguments, method)
        if method.page_choice == "snap":
            found["draft_refresh"] = arguments.draft_refresh
        if method.draft_weights:
            found["draft_precision"] = self._precision
        if method.draft_model or (method.chooses and arguments.draft_model):
            found["draft_model"] = arguments.draft_model
        if method.draft_model:
            found["draft_model_kv"] = arguments.draft_model_kv or variant.kv_target
        if quantises_cache({variant}, arguments.draft_model_kv):
            found["kv_rounding"] = self._kv_rounding
        return found

    def _configure(self, variant: Variant) -> None:
        self._engine.configure(
            page_choice=page_choice(self._arguments, variant.method),
            draft_refresh=self._arguments.draft_refresh if variant.method.page_choice == "snap" else 0,
            **variant.native(),
        )

    def _sample(
        self, variant: Variant, answers: Answers, traffic: Sequence[Mapping[str, Any]], repetition: int
    ) -> Sample:
        before = self._bandwidth_now
        self._configure(variant)
        if self._arguments.warm_up:
            # Tokens of another seed, so that the policy has measured the variant, but not the timed text.
            answers.warm_up(self._arguments.seed + repetition + 1, self._arguments.warm_up)
            self._engine.reset_stats()
        seconds, tokens = answers.run(self._arguments.seed + repetition)
        stats = self._engine.stats()
        # The draft of one sequence may end early; a batch's drafts are as long as its longest.
        # A right guess shares the step of the token before it.
        alone = stats["drafted_tokens"] - stats["copied_tokens"] - stats["right_guesses"]
        steps = alone if len(tokens) == 1 else answers.draft_steps
        stats |= {"passes": answers.passes, "draft_steps": steps}
        # The bandwidth after a run is the bandwidth before the next.
        after = self._bandwidth_now = self._bandwidth()
        return Sample(
            seconds,
            statistics.fmean(self._work.read_bytes(variant, of_one, stats) for of_one in traffic),
            (before, after),
            processed=sum(map(len, tokens)),
            stats=stats,
            tokens=tokens,
        )

    def _add(self, tokens: int) -> int:
        """Adds a prompt of this many tokens, which yields one token."""
        return self._engine.add(self._ids[:tokens], seed=self._arguments.seed, max_new_tokens=1, **SAMPLING)

    def _traffic_of(self, answers: Answers) -> list[dict[str, Any]]:
        """`_traffic` of each sequence. All take part in every round, so a run reads the mean of what it would read if all
        sequences were as long as one of them.
        """
        by_depth = {depth: self._traffic(depth, answers.tokens) for depth in set(answers.depths)}
        if self._draft_model is not None:
            for depth, traffic in by_depth.items():
                traffic["draft_model"] = self._traffic(depth, answers.tokens, self._draft_model)
        return [by_depth[depth] for depth in answers.depths]

    def _traffic(self, start: int, tokens: int, model: str | None = None) -> dict[str, Any]:
        """Bytes that steps at these positions read. Opens the checkpoint, so it must not be called between measurements."""
        with native_errors():
            return self._native.traffic(
                model or str(self._model.directory),
                start,
                tokens,
                self._weights,
                self._info["device"],
                draft_precision=self._precision,
            )

    def _prefill_bytes(self, depth: int, tokens: int) -> float:
        """Fewest bytes read by a prefill of `tokens` after `depth`: a layer's weights and the past once per block, the head
        once."""
        traffic = self._traffic(depth, tokens)
        blocks = range(depth, depth + tokens, self._info["block_rows"])
        layers = traffic["weights_bytes"] - traffic["head_bytes"]
        read: float = len(blocks) * layers + sum(blocks) * traffic["token_bytes"] + traffic["head_bytes"]
        return read

    def _row(self, samples: Sequence[Sample], test: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of every test."""
        times = [sample.ms_per_token for sample in samples]
        bytes_per_token = statistics.fmean(sample.read_bytes / sample.processed for sample in samples)
        bandwidths = [sample.bandwidth for sample in samples]
        steady = [sample for sample in samples if sample.steady]
        milliseconds = statistics.fmean(times)
        return {
            "quantspec": __version__,
            "model": self._model.name,
            "widened": self._widened,
            "device": self._info["device"],
            "device_name": self._info["device_name"],
            "simd": self._info.get("simd"),
            "threads": self._info["threads"],
            "method": None,
            "weights": self._weights,
            "kv_target": None,
            "gamma": None,
            "draft_pages": None,
            "accept": self._accept,
            **test,
            "ms_per_token": milliseconds,
            "ms_per_token_sd": statistics.stdev(times) if len(times) > 1 else 0.0,
            "tokens_per_s": 1e3 / milliseconds,
            "bytes_per_token": bytes_per_token,
            "gb_per_s": bytes_per_token / milliseconds / 1e6,
            "bandwidth_gb_per_s": statistics.fmean(bandwidths),
            "bandwidth_share": bandwidth_share(steady),
            "bandwidth_steady_repetitions": len(steady),
            "acceptance_rate": None,
            "mean_acceptance_length": None,
            "repetitions": len(samples),
            "samples_ms_per_token": times,
            "samples_bandwidth_gb_per_s": bandwidths,
        }
