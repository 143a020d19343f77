"""The hatchling hook of distributions that compile: ``DS_BUILD_OPS=1`` puts libraries into their
wheel.

A ``pyproject.toml`` names them below ``[tool.hatch.build.targets.wheel.hooks.custom]``, as
``extensions = ["ds_x.extension:EXTENSION"]``, and its ``hatch_build.py`` offers `get_build_hook`.
Without ``DS_BUILD_OPS=1`` the wheel has the sources only, which are compiled when first used.

This module alone is enough to build such a wheel: an sdist carries a copy of it, so that nothing of
ours has to be installed. No torch is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

KIT = "dscore-kernel-kit>=0.1.0,<0.2"
TOOLS = ("pybind11>=2.12", "ninja>=1.11.1")


def get_build_hook() -> type:
    """The hook's class, for hatchling, which only a build environment needs to have."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class CompiledWheel(BuildHookInterface):  # type: ignore[type-arg]
        """Compiles the extensions into ``prebuilt`` folders and adds those to the wheel."""

        def dependencies(self) -> list[str]:
            """What an isolated build needs in addition to hatchling."""
            if not is_wanted(self.target_name):
                return []
            return [*TOOLS, *([] if clone_of(Path(self.root)) else [KIT])]

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """See hatchling."""
            # An editable install has the sources at hand, and compiles when they are first used.
            if is_wanted(self.target_name) and version != "editable":
                places = self.config["extensions"]
                add_libraries(Path(self.root), Path(self.directory), places, build_data)

    return CompiledWheel


def is_wanted(target: str) -> bool:
    """Whether the environment asks for compiled libraries in what is built.

    ValueError: ``DS_BUILD_OPS`` is neither 0 nor 1.
    """
    asked = os.environ.get("DS_BUILD_OPS", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"DS_BUILD_OPS={asked}: use 1 to compile into the wheel, or 0")
    return asked == "1" and target == "wheel"


def clone_of(root: Path) -> Path | None:
    """The clone of our repository in which the distribution at `root` lies, if it is in one."""
    top = root.parent.parent
    return top if (top / "ops" / "kernel_kit" / "ds_kernel_kit").is_dir() else None


def add_libraries(
    root: Path, directory: Path, extensions: list[str], build_data: dict[str, Any]
) -> None:
    """Compile `extensions` (``module:name``) of the distribution at `root`, for its wheel.

    directory: where hatchling builds.
    build_data: hatchling's, to which libraries and the wheel's tags are added.
    """
    clone = clone_of(root)
    # The builder of this clone goes before an installed one: the two may be of different versions.
    sys.path[:0] = [str(root), *([str(clone), str(clone / "ops" / "kernel_kit")] if clone else [])]
    from ds_kernel_kit.build import prebuild

    for place in extensions:
        module, name = place.split(":")
        extension = getattr(importlib.import_module(module), name)
        assert extension.prebuilt is not None
        folder = extension.prebuilt.relative_to(root)
        for file in prebuild(extension, directory / folder.relative_to(folder.parts[0])):
            build_data["force_include"][str(file)] = f"{folder.as_posix()}/{file.name}"
    # A library is for one platform and one version of Python, which hatchling infers for the tag.
    build_data["pure_python"] = False
    build_data["infer_tag"] = True
