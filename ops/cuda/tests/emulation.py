"""The CUDA sources compiled as C++ over `emulated/cuda_runtime.h`: the same module, working on CPU
memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from ds_kernel_kit import build
from ds_kernel_kit.build import Extension, Unit
from ds_ops_cuda.extension import EXTENSION

EMULATED = Path(__file__).parent / "emulated"
# name, perhaps with template arguments, then <<<grid, threads, shared, stream>>>(
_LAUNCH = re.compile(r"([A-Za-z_][\w:]*(?:<[^<>;]*>)?)\s*<<<(.*?)>>>\(", re.DOTALL)


def emulated(folder: Path) -> ModuleType:
    """Write the translated sources into `folder`, build them (or take them from the cache) and load
    the module.
    """
    for source in EXTENSION.folder.iterdir():
        name = source.name.replace(".cu", "_cu.cpp")
        (folder / name).write_text(_translated(source.read_text()))
    for header in EMULATED.iterdir():
        (folder / header.name).write_text(header.read_text())
    units = tuple(Unit(u.path.replace(".cu", "_cu.cpp")) for u in EXTENSION.units)
    extension = Extension(
        name="ds-ops-cuda-emulated",
        module=EXTENSION.module,
        folder=folder,
        units=units,
        # jumps between stacks are what fortified libraries forbid
        flags=(
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-U_FORTIFY_SOURCE",
        ),
    )
    return build.load(extension)


def _translated(text: str) -> str:
    text = re.sub(r"#include <(cuda_\w+\.h)>", r'#include "\1"', text)
    out = ""
    position = 0
    while (found := _LAUNCH.search(text, position)) is not None:
        end = _closing(text, found.end())
        grid, threads = _arguments(found.group(2))[:2]
        call = (
            f"emulated::launch({grid}, {threads}, [&] {{ "
            f"{found.group(1)}({text[found.end() : end]}); }})"
        )
        out += text[position : found.start()] + call
        position = end + 1
    return out + text[position:]


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that was opened before `start` closes."""
    depth = 1
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError("a launch is not closed")


def _arguments(text: str) -> list[str]:
    """`text` at its outermost commas."""
    parts = [""]
    depth = 0
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
