"""What decoding has to read and to compute: the bytes and operations of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import predict
from ..options import METHODS
from .samples import pages_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..options import Method
    from .grid import Variant
    from .samples import Sample


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one engine. `traffic` is what `_native.traffic` counts of one sequence.

    Attributes:
        info: `Model.info`.
        draft_weights_bytes: of the engine's 4-bit draft weights, if `traffic` has none.
        draft_model_kv: the view of the draft model's cache; None for the target's.
        page_choice: of `--page-choice`.
    """

    info: Mapping[str, Any]
    draft_weights_bytes: int
    draft_model_kv: str | None
    page_choice: str | None

    def read_bytes(self, variant: Variant, traffic: Mapping[str, Any], stats: Mapping[str, Any]) -> float:
        """Bytes a run's verifications and drafts had to read, if all sequences are as long as that of `traffic`: weights once
        for all sequences of a pass; per sequence the visible pages of the view and the recent tokens.
        """
        page, recent = predict.page_bytes(traffic), traffic["buffer_tokens"] * traffic["token_bytes"]
        cache = traffic["pages"] * page[variant.kv_target] + recent
        read: float = stats["passes"] * traffic["weights_bytes"] + stats["rounds"] * cache
        drafted = stats["drafted_tokens"] - stats["copied_tokens"]
        pages = stats.get("draft_pages_mean") if variant.draft_pages == "auto" else variant.draft_pages
        shares = {variant.name: {"rounds": stats["rounds"], "drafted_tokens": drafted, "draft_pages_mean": pages}}
        # With several methods, each has its own bytes.
        for name, share in stats.get("by_method", shares).items():
            if METHODS[name].draft_view is not None and share["drafted_tokens"]:
                steps = stats["draft_steps"] * share["drafted_tokens"] / drafted
                read += self._drafted_bytes(METHODS[name], variant.kv_target, traffic, share, steps)
        return read

    def _drafted_bytes(
        self, method: Method, target: str, traffic: Mapping[str, Any], share: Mapping[str, Any], steps: float
    ) -> float:
        """Bytes that the drafts of one method read in `steps` steps."""
        if method.draft_model:
            traffic, target = traffic["draft_model"], self.draft_model_kv or target
        page, recent = predict.page_bytes(traffic), traffic["buffer_tokens"] * traffic["token_bytes"]
        weights = traffic["weights_bytes"]
        if method.draft_weights:
            weights = traffic["draft_weights_bytes"] or self.draft_weights_bytes
        view = page[target if method.draft_view == "target" else str(method.draft_view)]
        asked = share["draft_pages_mean"]
        pages = traffic["pages"] if asked == "all" else min(traffic["pages"], asked or 0.0)
        read: float = steps * weights + share["drafted_tokens"] * (pages * view + recent)
        if pages < traffic["pages"] and self.page_choice != "window" and method.pages is None:
            read += share["rounds"] * traffic["pages"] * traffic["page_score_bytes"]
        return read

    def flops(self, variant: Variant, traffic: Mapping[str, Any], runs: Sequence[Sample]) -> float:
        """Floating-point operations per emitted token: of verified rows, and of rows with which the model itself drafted."""
        visible = traffic["pages"] * predict.PAGE_TOKENS + traffic["buffer_tokens"]
        matrix, attention = predict.row_flops(self.info, visible)
        emitted = sum(run.processed for run in runs)
        proposed = sum(run.stats["drafted_tokens"] for run in runs) / emitted
        # Copies of earlier text are verified, and no network computed them.
        drafted = proposed - sum(run.stats["copied_tokens"] for run in runs) / emitted
        rounds = sum(run.stats["rounds"] for run in runs) / emitted
        operations: float = (proposed + rounds) * (matrix + attention)
        if variant.method.draft_view is not None and not variant.method.draft_model:
            share = 1.0 if variant.draft_pages == "all" else pages_share(traffic, runs)
            operations += drafted * (matrix + attention * share)
        return operations


def pages_share(traffic: Mapping[str, Any], runs: Sequence[Sample]) -> float:
    """Share of the visible tokens that a draft with selected pages reads."""
    recent = traffic["buffer_tokens"]
    read = min(pages_mean(runs) or 0.0, traffic["pages"]) * predict.PAGE_TOKENS + recent
    share: float = read / max(traffic["pages"] * predict.PAGE_TOKENS + recent, 1)
    return share
