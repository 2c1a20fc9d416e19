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
        (["LDGSTS.E.BYPASS.128 [R3+UR4+0x1200], desc[UR6][R24.64] ;"], []),
        (["LDGSTS.E.BYPASS.128 [R3+UR0+0x1200], desc[UR1][R24.64] ;"], ["'LDGSTS.E.BYPASS.128 [R3+UR0"]),
        (["LDGSTS.E.BYPASS.128 [R3+UR10], desc[UR11][R24.64] ;"], ["'LDGSTS.E.BYPASS.128 [R3+UR10"]),
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


def test_copies_that_ptxas_gets_wrong(check: ModuleType) -> None:
    plain = "cp.async.cg.shared.global [%r1],[%rd2],16;"
    assert not check.ptx_violations(f"{plain}\ncreatepolicy.fractional.L2::evict_first.b64 %rd3, 1.0;")
    (found,) = check.ptx_violations(f"{plain}\ncp.async.cg.shared.global.L2::cache_hint [%r1],[%rd2],16,%rd3;")
    assert "cache_hint" in found
