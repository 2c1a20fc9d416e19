#!/usr/bin/env python3
"""Check the machine code of every kernel, without a GPU.

    python tools/check_sass.py target/kernel-images

For each image of the last build, disassembled by nvdisasm (package nvidia-cuda-nvdisasm):

* No main loop accesses local memory: a spill there costs a cache access per iteration. A main loop contains matrix
  instructions and no other loop that does; it includes inner loops that copy or wait. `SPILLS` lists the kernels whose
  main loops may have some accesses. Spills around main loops, and in warps that only copy, are not checked.
* In a kernel without matrix instructions no loop accesses local memory, except `SPILLS_BESIDE`.
* At least the share `SHARE` of a kernel's matrix instructions is in its main loops, so that no loop is overlooked.
  `PEELED` names kernels that repeat part of their loop outside of it; for these, half is enough.
* Main loops wait for at most three of four asynchronous matrix instructions (wgmma). If registers or source order are
  unsuitable, ptxas waits after every one, with the same results.
* No instruction has a descriptor in an odd uniform register, as in `LDGSTS [R3+UR0+0x1200], desc[UR1]`. Descriptors are
  aligned pairs; ptxas encodes such an instruction when it adds a uniform base to the address of an asynchronous copy with
  a cache hint. It is illegal on the GPU. PTX, which another ptxas assembles, must not contain such copies.
* Every kernel with a main loop reads memory by 16-byte loads or bulk copies. A main loop has at most `PAGE_NUMBERS`
  global loads below 8 bytes (8-byte loads read scales).

Prints one line per violation and exits 1, or prints a summary.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import and_
from pathlib import Path

# Local accesses in the main loops of kernels that need more values than registers.
SPILLS = {
    # Decoding of 25 to 32 query rows per KV head reloads one value per page, which is about 1,200 instructions; it never
    # stores.
    ("attend_both_128_32", "sm_90a"): 1,
    # Prefill attention holds the scores of a tile of keys and its whole output, of either type. On Blackwell it reloads the
    # first masked tile's index once per tile, which is 1,200 to 1,400 instructions.
    **{(f"prefill_attend_128_{out}", sm): 1 for out in ("bf16", "f16") for sm in ("sm_100", "sm_120")},
    # On Turing, where copies pass through registers, 8 of some 1,700 instructions per tile load and store the sums of four
    # rows, and 4 reload loop invariants; kernels of local layers have one invariant more.
    **{(f"prefill_attend_128_{out}", "sm_75"): 12 for out in ("bf16", "f16")},
    **{(f"prefill_attend_128_local_{out}", "sm_75"): 13 for out in ("bf16", "f16")},
}

# Loops of kernels without matrix instructions. `judge` has 1,024 threads, so 64 registers, and runs once a round: with
# rejection, an iteration of its single loop over the vocabulary reloads one value.
SPILLS_BESIDE = {"judge": 1}

# Most kernels have all matrix instructions in their main loops. Attention over pages prepares the first page before its loop,
# which is up to an eighth of them; without one of its two loops it would have at most 71 percent.
SHARE = 0.8

# On Hopper, prefill attention has Q K^T of the first tile before its loop and P V of the last after it, together one
# iteration, so half of the instructions. Prefill GEMMs do four blocks of K per iteration and up to three remaining blocks
# after the loop, so four sevenths are inside.
PEELED = re.compile(r"prefill_(attend_(few_)?(64|128)|qkv_(64|128|256)|residual|gated)_")
PEELED_SHARE = 0.5

# An entry of a page list and one of the page table, at the two places where a loop fetches the next page number.
PAGE_NUMBERS = 4

LABEL = re.compile(r"(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(.*)")
# A call of a label does not return, unlike a call of a function: ptxas leaves loops this way on compute capability 8.x.
BRANCH = re.compile(r"\b(?:BRA|CALL)\b.*`\((\.L_x_\d+)\)")
# Instructions after which control never falls through. A branch can fall through if it has a predicate (before it or its
# label) or a suffix, such as .DIV for a diverged warp.
END = re.compile(r"BRA `|EXIT ;|RET\b")
MATRIX = re.compile(r"\b(HMMA|IMMA|HGMMA|IGMMA)\b")
ASYNCHRONOUS = re.compile(r"\b[HI]GMMA\b")
WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\b")
WAITS = 0.75
LOCAL = re.compile(r"\b(LDL|STL)\b")
ODD_DESCRIPTOR = re.compile(r"desc\[UR\d*[13579]\]")
HINTED_COPY = re.compile(r"cp\.async\.\S*shared\S*\.L2::cache_hint")
WIDE = re.compile(r"\b(LDG|LDGSTS)\.[A-Z0-9.]*128|\b(UBLKCP|UTMALDG)\b")
GLOBAL = re.compile(r"\bLDG\b(?!\S*\.(64|128))")


@dataclass
class Kernel:
    """Instructions by address, and the positions of labels."""

    name: str
    instructions: list[tuple[int, str]]
    labels: dict[str, int]

    def blocks(self) -> tuple[list[list[str]], list[list[int]]]:
        """Basic blocks, and the successors of each."""
        blocks: list[list[str]] = []
        at: dict[int, int] = {}
        labelled, left = set(self.labels.values()), True
        for address, text in self.instructions:
            if left or address in labelled:
                at[address] = len(blocks)
                blocks.append([])
            blocks[-1].append(text)
            left = bool(BRANCH.search(text) or END.match(text))
        followers: list[list[int]] = []
        for number, block in enumerate(blocks, 1):
            branch = BRANCH.search(block[-1])
            followers.append([at[self.labels[branch[1]]]] if branch else [])
            if number < len(blocks) and not END.match(block[-1]):
                followers[-1].append(number)
        return blocks, followers

    @cached_property
    def main_loops(self) -> list[list[str]]:
        """The instructions of each loop with matrix instructions that contains no other such loop."""
        blocks, followers = self.blocks()
        matrix = {number for number, block in enumerate(blocks) if any(MATRIX.search(text) for text in block)}
        if not matrix:
            return []
        loops = [loop for loop in natural_loops(followers) if loop & matrix]
        innermost = [loop for loop in loops if not any(other < loop for other in loops)]
        return [[text for number in sorted(loop) for text in blocks[number]] for loop in innermost]

    @cached_property
    def spills_in_loops(self) -> int:
        """Accesses to local memory in any loop."""
        blocks, followers = self.blocks()
        inside: set[int] = set().union(*natural_loops(followers))
        return sum(bool(LOCAL.search(text)) for number in inside for text in blocks[number])


def natural_loops(followers: list[list[int]]) -> list[set[int]]:
    """The loops of code that begins with block 0, wherever their blocks are: ptxas puts waiting blocks after all others.

    A loop is a head block and the blocks that lead back to it; the head dominates them.
    """
    before: list[list[int]] = [[] for _ in followers]
    reached, waiting = {0}, [0]
    while waiting:
        block = waiting.pop()
        for follower in followers[block]:
            before[follower].append(block)
            if follower not in reached:
                reached.add(follower)
                waiting.append(follower)
    # Dominators of each block, as bits: all bits until a path is known.
    dominators = [1] + [-1] * (len(followers) - 1)
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            bits = reduce(and_, (dominators[other] for other in before[block])) | 1 << block
            changed |= bits != dominators[block]
            dominators[block] = bits
    loops = []
    for head in sorted(reached):
        loop, waiting = {head}, [block for block in before[head] if dominators[block] >> head & 1]
        if not waiting:
            continue
        while waiting:
            block = waiting.pop()
            if block not in loop:
                loop.add(block)
                waiting += before[block]
        loops.append(loop)
    return loops


def kernels(listing: str) -> list[Kernel]:
    """The kernels of a disassembly."""
    found: list[Kernel] = []
    waiting: list[str] = []
    for line in listing.splitlines():
        if line.startswith(".text."):
            found.append(Kernel(line.removeprefix(".text.").rstrip(":"), [], {}))
        elif found and (label := LABEL.match(line)):
            waiting.append(label[1])
        elif found and (instruction := INSTRUCTION.match(line)):
            address = int(instruction[1], 16)
            found[-1].labels |= dict.fromkeys(waiting, address)
            found[-1].instructions.append((address, instruction[2]))
            waiting = []
    return found


def violations(kernel: Kernel, architecture: str) -> list[str]:
    """Violations in a kernel."""
    loops = kernel.main_loops
    found = [f"{text.strip()!r} does not exist" for _, text in kernel.instructions if ODD_DESCRIPTOR.search(text)][:1]
    spills = sum(bool(LOCAL.search(text)) for body in loops for text in body)
    if spills > SPILLS.get((kernel.name, architecture), 0):
        found.append(f"{spills} accesses to local memory in its main loops")
    matrix = sum(bool(MATRIX.search(text)) for _, text in kernel.instructions)
    if not matrix and kernel.spills_in_loops > SPILLS_BESIDE.get(kernel.name, 0):
        found.append(f"{kernel.spills_in_loops} accesses to local memory in loops")
    inside = sum(bool(MATRIX.search(text)) for body in loops for text in body)
    peeled = architecture == "sm_90a" and PEELED.match(kernel.name)
    if inside < matrix * (PEELED_SHARE if peeled else SHARE):
        found.append(f"only {inside} of its {matrix} matrix instructions are in main loops")
    if loops and not any(WIDE.search(text) for _, text in kernel.instructions):
        found.append("no load of 16 bytes")
    for body in loops:
        asynchronous, waits = (sum(bool(of.search(text)) for text in body) for of in (ASYNCHRONOUS, WAIT))
        if waits > WAITS * asynchronous:
            found.append(f"{waits} waits for {asynchronous} asynchronous matrix instructions in a main loop")
        narrow = [text for text in body if GLOBAL.search(text)]
        if len(narrow) > PAGE_NUMBERS:
            found.append(f"{len(narrow)} narrow loads in a main loop, the first {narrow[0].strip()!r}")
    return found


def ptx_violations(text: str) -> list[str]:
    """Violations in PTX."""
    return [f"{copy[0]!r}, which ptxas may encode as an illegal instruction" for copy in HINTED_COPY.finditer(text)][:1]


def nvdisasm() -> Path:
    """The disassembler of the package."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec else None) or []:
        for path in Path(root).glob("*/bin/nvdisasm*"):
            return path
    sys.exit("error: nvdisasm was not found\nhint: pip install --group dev")


def newest(folder: Path) -> list[Path]:
    """The images of the last build; the folder may contain earlier ones."""
    images: dict[tuple[str, ...], Path] = {}
    for path in sorted(folder.glob("*.*_*"), key=lambda path: path.stat().st_mtime):
        if not path.name.endswith(".partial"):
            images[tuple(path.name.split(".")[:2])] = path
    return sorted(images.values())


def checked(program: Path, image: Path) -> tuple[list[str], int]:
    """The violations of an image, and its number of main loops."""
    stem, architecture = image.name.split(".")[:2]
    code = zlib.decompress(image.read_bytes(), wbits=-zlib.MAX_WBITS)
    if architecture.startswith("compute_"):
        return [f"{stem}.cu for {architecture}: {text}" for text in ptx_violations(code.decode())], 0
    with tempfile.NamedTemporaryFile() as cubin:
        cubin.write(code)
        cubin.flush()
        listing = subprocess.run([program, "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    lines, loops = [], 0
    for kernel in kernels(listing):
        loops += len(kernel.main_loops)
        lines += [f"{stem}.cu for {architecture}: {kernel.name}: {text}" for text in violations(kernel, architecture)]
    return lines, loops


def main() -> int:
    """Checks a folder of images."""
    parser = argparse.ArgumentParser(description="Check the machine code of every kernel.")
    parser.add_argument("folder", type=Path, help="target/kernel-images")
    images = newest(parser.parse_args().folder)
    wrong, loops = 0, 0
    with ProcessPoolExecutor() as pool:
        for lines, found in pool.map(partial(checked, nvdisasm()), images):
            loops += found
            wrong += len(lines)
            print(*lines, sep="\n", end="\n" * bool(lines))
    if not loops:
        sys.exit(f"error: no kernel with a main loop under {len(images)} images\nhint: build with QUANTSPEC_KERNELS=on")
    print(f"{len(images)} images, {loops} main loops, {wrong} violations")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
