"""`--report FILE`: the results of `bench`, `eval` or `batch` as one page of charts with their numbers.

`charts` draws, `page` lays out, and a file for each command selects the content (`benchmark`, `evaluation`, `documents`).
A chart without data is left out; a page without charts says so.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .. import output
from ..errors import UsageError
from .benchmark import bench
from .documents import batch
from .evaluation import evaluation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["batch", "bench", "evaluation", "opened"]


@contextlib.contextmanager
def opened(
    path: str | None, inputs: Iterable[str | None], other: str | None = None
) -> Iterator[output.AtomicFile | None]:
    """The file of `--report` while the body runs, None if there is none. Refuses to overwrite an input or the file of
    `--output`, which is `other`.
    """
    if path == "":
        raise UsageError("--report is ''", "name a file, such as report.html", option="report")
    if path is not None and (path == "-" or output.descriptor(path) is not None):
        raise UsageError(f"--report {path} is an open stream", "name a file, such as report.html", option="report")
    with output.opened(path, inputs) as file:
        if file is not None and other is not None and file.is_at(other):
            raise UsageError(f"--report and --output are both {path}", "name two files", option="report")
        yield file
