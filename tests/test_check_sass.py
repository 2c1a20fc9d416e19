"""The check of machine code sees what it is to see."""

from __future__ import annotations

from types import ModuleType

import pytest
from conftest import tool


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return tool("check_sass")


def listing(*body: str) -> str:
    lines = ["LDG.E.128 R4, [R2.64] ;", *body, "HMMA.16816.F32 R8, R4, R6, R8 ;", "@P0 BRA `(.L_x_1) ;"]
    code = [f"        /*{16 * index:04x}*/                   {text}" for index, text in enumerate(lines, 1)]
    before = [".text.some_kernel:", "        /*0000*/                   STL [R1], R2 ;", ".L_x_1:"]
    return "\n".join([*before, *code])


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ([], []),
        (["LDL R3, [R1] ;"], ["1 accesses to local memory"]),
        (["LDG.E R3, [R2.64] ;"] * 4, []),
        (["LDG.E R3, [R2.64] ;"] * 5, ["5 narrow loads"]),
        (["LDG.E.64 R3, [R2.64] ;"] * 5, []),
    ],
)
def test_main_loops(check: ModuleType, body: list[str], wrong: list[str]) -> None:
    (kernel,) = check.kernels(listing(*body))
    assert len(kernel.main_loops()) == 1
    found = check.violations(kernel, "sm_90a")
    assert len(found) == len(wrong)
    assert all(text.startswith(start) for text, start in zip(found, wrong, strict=True))


def test_a_kernel_that_reads_in_small_pieces(check: ModuleType) -> None:
    (kernel,) = check.kernels(listing().replace("LDG.E.128", "LDG.E.64"))
    assert check.violations(kernel, "sm_90a") == ["no load of 16 bytes"]
