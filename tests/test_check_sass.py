"""The check of machine code detects each kind of violation."""

from __future__ import annotations

from types import ModuleType

import pytest
from conftest import tool


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return tool("check_sass")


def disassembly(name: str, *lines: str) -> str:
    """A kernel of labels (at the start of a line) and instructions."""
    listing, address = [f".text.{name}:"], 0
    for line in lines:
        if line.startswith(".L_x_"):
            listing.append(line)
        else:
            listing.append(f"        /*{address:04x}*/                   {line}")
            address += 16
    return "\n".join(listing)


WGMMA, WAITS_FOR_IT = "HGMMA.64x32x16.F32 R24, R88, gdesc[UR16], R24, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"
LOAD, PRODUCT, SPILL = "LDG.E.128 R4, [R2.64] ;", "HMMA.16816.F32 R8, R4, R6, R8 ;", "LDL R3, [R1] ;"


def listing(*body: str) -> str:
    return disassembly("some_kernel", "STL [R1], R2 ;", ".L_x_1:", LOAD, *body, PRODUCT, "@P0 BRA `(.L_x_1) ;")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ([], []),
        (["LDL R3, [R1] ;"], ["1 accesses to local memory"]),
        (["LDG.E R3, [R2.64] ;"] * 4, []),
        (["LDG.E R3, [R2.64] ;"] * 5, ["5 narrow loads"]),
        (["LDG.E.64 R3, [R2.64] ;"] * 5, []),
        ([WGMMA, WGMMA, WAITS_FOR_IT, WGMMA, WGMMA, WAITS_FOR_IT, WAITS_FOR_IT], []),
        ([WGMMA, WAITS_FOR_IT] * 4, ["4 waits for 4 asynchronous"]),
        (["LDGSTS.E.BYPASS.128 [R3+UR4+0x1200], desc[UR6][R24.64] ;"], []),
        (["LDGSTS.E.BYPASS.128 [R3+UR0+0x1200], desc[UR1][R24.64] ;"], ["'LDGSTS.E.BYPASS.128 [R3+UR0"]),
        (["LDGSTS.E.BYPASS.128 [R3+UR10], desc[UR11][R24.64] ;"], ["'LDGSTS.E.BYPASS.128 [R3+UR10"]),
    ],
)
def test_violations_in_a_main_loop_are_found(check: ModuleType, body: list[str], wrong: list[str]) -> None:
    (kernel,) = check.kernels(listing(*body))
    assert len(kernel.main_loops) == 1
    found = check.violations(kernel, "sm_90a")
    assert len(found) == len(wrong)
    assert all(text.startswith(start) for text, start in zip(found, wrong, strict=True))


COPY = [".L_x_2:", "LDGSTS.E.BYPASS.128 [R3], [R24.64] ;", "@P1 BRA `(.L_x_2) ;"]
WAIT = [".L_x_2:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R12+URZ], R7 ;", "@!P1 BRA `(.L_x_2) ;"]


@pytest.mark.parametrize("inner", [COPY, WAIT, ["BRA.DIV UR4, `(.L_x_2) ;", ".L_x_2:"]])
@pytest.mark.parametrize("spills", [0, 1])
def test_a_main_loop_that_copies_or_waits(check: ModuleType, inner: list[str], spills: int) -> None:
    (kernel,) = check.kernels(listing(*inner, *[SPILL] * spills))
    (loop,) = kernel.main_loops
    assert loop[0].startswith("LDG")
    assert loop[-1].startswith("@P0 BRA")
    assert check.violations(kernel, "sm_90a") == ["1 accesses to local memory in its main loops"] * spills


def test_a_spill_inside_a_copy_loop(check: ModuleType) -> None:
    (kernel,) = check.kernels(listing(*COPY[:-1], SPILL, COPY[-1]))
    assert check.violations(kernel, "sm_90a") == ["1 accesses to local memory in its main loops"]


# After the end of the kernel, with a branch back into the main loop.
WAIT_BEHIND = [".L_x_2:", "YIELD ;", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R12+URZ], R7 ;", "@!P1 BRA `(.L_x_2) ;"]
PARTED = [
    ".L_x_2:",
    "WARPSYNC.COLLECTIVE R4, `(.L_x_4) ;",
    "SHFL.BFLY P1, R5, R7, R6, R9 ;",
    "ENDCOLLECTIVE ;",
    ".L_x_4:",
]


@pytest.mark.parametrize(
    ("inside", "after"),
    [
        ("@!P1 BRA `(.L_x_2) ;", WAIT_BEHIND),
        ("BRA.DIV UR4, `(.L_x_2) ;", PARTED),
        ("@P1 BRA P2, `(.L_x_2) ;", [".L_x_2:", "CALL.REL.NOINC `($some_function) ;"]),
    ],
)
@pytest.mark.parametrize("spills", [0, 1])
def test_blocks_after_a_kernel_belong_to_the_loop_they_jump_back_to(
    check: ModuleType, inside: str, after: list[str], spills: int
) -> None:
    loop = [".L_x_1:", LOAD, inside, ".L_x_3:", PRODUCT, "@P0 BRA `(.L_x_1) ;"]
    between = [SPILL, "STG.E [R2.64], R3 ;", "EXIT ;"]
    code = disassembly("some_kernel", *loop, *between, *after, *[SPILL] * spills, "BRA `(.L_x_3) ;")
    (kernel,) = check.kernels(code)
    (body,) = kernel.main_loops
    assert not any(text.startswith(("STG", "EXIT")) for text in body)
    assert body[-1] == "BRA `(.L_x_3) ;"
    assert check.violations(kernel, "sm_90a") == ["1 accesses to local memory in its main loops"] * spills


def test_the_innermost_of_loops_with_matrix_instructions(check: ModuleType) -> None:
    inner = [".L_x_1:", *COPY, LOAD, PRODUCT, "@P0 BRA `(.L_x_1) ;"]
    last = [".L_x_5:", PRODUCT, "@!P3 CALL.REL.NOINC `(.L_x_6) ;", "BRA `(.L_x_5) ;", ".L_x_6:", "EXIT ;"]
    code = disassembly("some_kernel", ".L_x_0:", SPILL, *inner, SPILL, "@P2 BRA `(.L_x_0) ;", *last)
    (kernel,) = check.kernels(code)
    assert [len(loop) for loop in kernel.main_loops] == [5, 3]
    assert check.violations(kernel, "sm_90a") == []


@pytest.mark.parametrize(
    ("name", "architecture", "inside", "outside", "wrong"),
    [
        ("some_kernel", "sm_90a", 4, 1, []),
        ("some_kernel", "sm_90a", 3, 1, ["only 3 of its 4 matrix instructions are in main loops"]),
        ("some_kernel", "sm_90a", 0, 1, ["only 0 of its 1 matrix instructions are in main loops"]),
        ("prefill_attend_128_f16", "sm_90a", 2, 2, []),
        ("prefill_attend_128_f16", "sm_90a", 2, 3, ["only 2 of its 5 matrix instructions are in main loops"]),
        ("prefill_attend_128_f16", "sm_80", 2, 2, ["only 2 of its 4 matrix instructions are in main loops"]),
        ("prefill_attend_256_f16", "sm_90a", 2, 2, ["only 2 of its 4 matrix instructions are in main loops"]),
        ("prefill_qkv_256_bf16_wide", "sm_90a", 16, 12, []),
        ("prefill_gated_f16_small", "sm_90a", 13, 15, ["only 13 of its 28 matrix instructions are in main loops"]),
    ],
)
def test_matrix_instructions_outside_of_loops(
    check: ModuleType, name: str, architecture: str, inside: int, outside: int, wrong: list[str]
) -> None:
    loop = [".L_x_1:", LOAD, *[PRODUCT] * inside, "@P0 BRA `(.L_x_1) ;"]
    (kernel,) = check.kernels(disassembly(name, *[PRODUCT] * outside, *loop, "EXIT ;"))
    assert check.violations(kernel, architecture) == wrong


def test_a_jump_into_the_middle_of_a_loop_hides_nothing(check: ModuleType) -> None:
    # No block dominates the loop, so it is not found, and its matrix instructions count as missing.
    loop = [".L_x_1:", LOAD, SPILL, ".L_x_2:", PRODUCT, "@P0 BRA `(.L_x_1) ;", "EXIT ;"]
    (kernel,) = check.kernels(disassembly("some_kernel", "@P1 BRA `(.L_x_2) ;", *loop))
    assert check.violations(kernel, "sm_90a") == ["only 0 of its 1 matrix instructions are in main loops"]


@pytest.mark.parametrize("more", [0, 1])
def test_allowed_spills_pass_and_one_more_does_not(check: ModuleType, more: int) -> None:
    for (name, architecture), spills in check.SPILLS.items():
        (kernel,) = check.kernels(listing(*[SPILL] * (spills + more)).replace("some_kernel", name))
        assert (
            check.violations(kernel, architecture)
            == [f"{spills + 1} accesses to local memory in its main loops"] * more
        )


@pytest.mark.parametrize(("name", "allowed"), [("norm_f32", 0), ("judge", 1)])
def test_kernels_without_matrix_instructions_do_not_spill_in_loops(check: ModuleType, name: str, allowed: int) -> None:
    for spills in (0, 1, 2):
        loops = [".L_x_1:", LOAD, ".L_x_2:", *[SPILL] * spills, "@P1 BRA `(.L_x_2) ;", "@P0 BRA `(.L_x_1) ;"]
        (kernel,) = check.kernels(disassembly(name, SPILL, *loops, SPILL, "EXIT ;"))
        wrong = [] if spills <= allowed else [f"{spills} accesses to local memory in loops"]
        assert check.violations(kernel, "sm_90a") == wrong


def test_a_kernel_that_reads_in_small_pieces(check: ModuleType) -> None:
    (kernel,) = check.kernels(listing().replace("LDG.E.128", "LDG.E.64"))
    assert check.violations(kernel, "sm_90a") == ["no load of 16 bytes"]


def test_copies_that_ptxas_gets_wrong(check: ModuleType) -> None:
    plain = "cp.async.cg.shared.global [%r1],[%rd2],16;"
    assert not check.ptx_violations(f"{plain}\ncreatepolicy.fractional.L2::evict_first.b64 %rd3, 1.0;")
    (found,) = check.ptx_violations(f"{plain}\ncp.async.cg.shared.global.L2::cache_hint [%r1],[%rd2],16,%rd3;")
    assert "cache_hint" in found
