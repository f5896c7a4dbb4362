"""Compiles the kernels for three generations of GPUs, and prints what their machine code does as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from kvarena.transfer.same_host.copy import kernel as kernels

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
PAGES = {"small": 16 << 10, "middle": 64 << 10, "large": 128 << 10}
# What moves data: .E is an access by 64-bit address, the number its width in bits.
ACCESS = re.compile(r"\b(LDG|STG|LDL|STL)\.E?\.?([\w.]*)")


def describe(name: str, kernel: kernels.Compiled) -> dict[str, object]:
    """Count the accesses to memory, in the order of the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        command = [str(DISASSEMBLER), "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Code behind the last exit only pads.
    accesses = ACCESS.findall(code)
    stores = [index for index, (what, _) in enumerate(accesses) if what == "STG"]
    assert stores, f"{name} stores nothing"
    return {
        "name": name,
        "threads": kernel.threads,
        "shared_bytes": kernel.shared_bytes,
        "scratch": sum(what in ("LDL", "STL") for what, _ in accesses),
        "loads_after_a_store": sum(what == "LDG" for what, _ in accesses[stores[0] :]),
        "widest": max(_width(suffix) for what, suffix in accesses if what == "STG"),
    }


def _width(suffix: str) -> int:
    if "U8" in suffix:
        return 1
    bits = re.search(r"\b(16|32|64|128|256)\b", suffix)
    return int(bits[1]) // 8 if bits else 4


if __name__ == "__main__":
    found = []
    for capability in (80, 90, 100):
        for aligned in (True, False):
            kind = "aligned" if aligned else "odd"
            for size, nbytes in PAGES.items():
                kernel = kernels.compile_pages(
                    capability, nbytes, aligned, kernels.page_tuning(nbytes, aligned)
                )
                found.append(describe(f"sm{capability}-{size}-{kind}", kernel))
            kernel = kernels.compile_spans(capability, aligned, kernels.Tuning())
            found.append(describe(f"sm{capability}-spans-{kind}", kernel))
    json.dump(found, sys.stdout)
