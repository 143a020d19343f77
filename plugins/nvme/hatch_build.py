"""With ``DS_BUILD_OPS=1``, the wheel carries the compiled engines (for this Python and platform);
else sources only.

What compiles is the builder of ds-kernel-kit, taken from this checkout where it is not installed.
No torch is loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles into ``ds_nvme/prebuilt`` and adds that to the wheel."""

    def dependencies(self) -> list[str]:
        """What an isolated build needs in addition to hatchling."""
        return ["pybind11>=2.12", "ninja>=1.11.1"] if self.wanted() else []

    def wanted(self) -> bool:
        """Whether a wheel with compiled engines is asked for; an editable install has the sources
        at hand.
        """
        asked = os.environ.get("DS_BUILD_OPS", "0")
        if asked not in ("0", "1"):
            raise ValueError(
                f"DS_BUILD_OPS={asked}: use 1 to compile the engines into the wheel, or 0"
            )
        return asked == "1" and self.target_name == "wheel"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        if not self.wanted() or version == "editable":
            return
        for folder, package in (
            (HERE, "ds_nvme"),
            (HERE.parent.parent, "ds_core"),
            (HERE.parent.parent / "ops" / "kernel_kit", "ds_kernel_kit"),
        ):
            if (folder / package).is_dir():
                sys.path.insert(0, str(folder))
        from ds_kernel_kit.build import prebuild
        from ds_nvme.native import EXTENSION

        assert EXTENSION.prebuilt is not None
        for file in prebuild(EXTENSION, Path(self.directory) / "prebuilt"):
            build_data["force_include"][str(file)] = f"ds_nvme/prebuilt/{file.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
