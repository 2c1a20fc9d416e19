#!/usr/bin/env python3
"""Check what must be true of the machine code of every kernel, without a GPU.

    python tools/check_sass.py target/kernel-images

Of each image that the build left there, disassembled by nvdisasm (package nvidia-cuda-nvdisasm):

* no main loop, an innermost loop with matrix instructions, touches local memory: a spill there costs a trip to the cache
  in every turn. `SPILLS` lists the kernels that are allowed some, and how many;
* no instruction has a descriptor in an odd uniform register, as in `LDGSTS [R3+UR0+0x1200], desc[UR1]`: descriptors are
  aligned pairs, and ptxas encodes such an instruction where it added a uniform base to the address of an asynchronous
  copy with a cache hint. A GPU refuses to run it. PTX, which another ptxas will assemble, must not have such copies;
* every kernel with a main loop reads memory 16 bytes at a time or by bulk copies, and a main loop has at most
  `PAGE_NUMBERS` loads of global memory below 8 bytes (what is read 8 bytes at a time are scales).

Prints one line per violation and exits 1, or a summary.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

# Local accesses in the main loops of kernels for 25 to 32 query rows a KV head, which have more in hand than there are
# registers: on Hopper one or two values are loaded again per page of some 1,300 instructions, and heads of 256 channels
# spill some on three architectures.
SPILLS = {("attend_both_128_32", "sm_90a"): 3} | {("attend_both_256_32", sm): 16 for sm in ("sm_80", "sm_86", "sm_89")}

# An entry of a list of pages and one of the page table, at the two places where a loop asks for the next page.
PAGE_NUMBERS = 4

LABEL = re.compile(r"(\.L_x_\d+):")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(.*)")
BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
MATRIX = re.compile(r"\b(HMMA|IMMA|HGMMA)\b")
LOCAL = re.compile(r"\b(LDL|STL)\b")
ODD_DESCRIPTOR = re.compile(r"desc\[UR\d*[13579]\]")
HINTED_COPY = re.compile(r"cp\.async\.\S*shared\S*\.L2::cache_hint")
WIDE = re.compile(r"\b(LDG|LDGSTS)\.[A-Z0-9.]*128|\b(UBLKCP|UTMALDG)\b")
GLOBAL = re.compile(r"\bLDG\b(?!\S*\.(64|128))")


@dataclass
class Kernel:
    """Instructions by address, and where labels stand."""

    name: str
    instructions: list[tuple[int, str]]
    labels: dict[str, int]

    def main_loops(self) -> list[list[str]]:
        """Innermost loops that multiply matrices: between a branch back and its target, without another such pair."""
        back = {
            (self.labels[match[1]], address)
            for address, text in self.instructions
            if (match := BRANCH.search(text)) and self.labels.get(match[1], address) < address
        }
        innermost = [loop for loop in back if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in back)]
        bodies = [
            [text for address, text in self.instructions if first <= address <= last]
            for first, last in sorted(innermost)
        ]
        return [body for body in bodies if any(MATRIX.search(text) for text in body)]


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
    """What is wrong with a kernel."""
    loops = kernel.main_loops()
    found = [f"{text.strip()!r} does not exist" for _, text in kernel.instructions if ODD_DESCRIPTOR.search(text)][:1]
    spills = sum(bool(LOCAL.search(text)) for body in loops for text in body)
    if spills > SPILLS.get((kernel.name, architecture), 0):
        found.append(f"{spills} accesses to local memory in its main loops")
    if loops and not any(WIDE.search(text) for _, text in kernel.instructions):
        found.append("no load of 16 bytes")
    for body in loops:
        narrow = [text for text in body if GLOBAL.search(text)]
        if len(narrow) > PAGE_NUMBERS:
            found.append(f"{len(narrow)} narrow loads in a main loop, the first {narrow[0].strip()!r}")
    return found


def ptx_violations(text: str) -> list[str]:
    """What is wrong with PTX."""
    return [f"{copy[0]!r}, which ptxas may assemble to what does not exist" for copy in HINTED_COPY.finditer(text)][:1]


def nvdisasm() -> Path:
    """The disassembler of the package."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec else None) or []:
        for path in Path(root).glob("*/bin/nvdisasm*"):
            return path
    sys.exit("error: nvdisasm was not found\nhint: pip install --group dev")


def newest(folder: Path) -> list[Path]:
    """The images of the last build: earlier ones may lie beside them."""
    images: dict[tuple[str, ...], Path] = {}
    for path in sorted(folder.glob("*.*_*"), key=lambda path: path.stat().st_mtime):
        if not path.name.endswith(".partial"):
            images[tuple(path.name.split(".")[:2])] = path
    return sorted(images.values())


def main() -> int:
    """Checks a folder of images."""
    parser = argparse.ArgumentParser(description="Check the machine code of every kernel.")
    parser.add_argument("folder", type=Path, help="target/kernel-images")
    images = newest(parser.parse_args().folder)
    program, wrong, loops = nvdisasm(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for path in images:
            stem, architecture = path.name.split(".")[:2]
            image = zlib.decompress(path.read_bytes(), wbits=-zlib.MAX_WBITS)
            if architecture.startswith("compute_"):
                for text in ptx_violations(image.decode()):
                    print(f"{stem}.cu for {architecture}: {text}")
                    wrong += 1
                continue
            cubin = Path(folder, "image.cubin")
            cubin.write_bytes(image)
            listing = subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True).stdout
            for kernel in kernels(listing):
                loops += len(kernel.main_loops())
                for text in violations(kernel, architecture):
                    print(f"{stem}.cu for {architecture}: {kernel.name}: {text}")
                    wrong += 1
    if not loops:
        sys.exit(f"error: no kernel with a main loop under {len(images)} images\nhint: build with QUANTSPEC_KERNELS=on")
    print(f"{len(images)} images, {loops} main loops, {wrong} violations")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
