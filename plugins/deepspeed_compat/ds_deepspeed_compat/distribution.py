"""The distribution that `importlib.metadata` finds for ``deepspeed`` (standard library only)."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from ds_deepspeed_compat.version import VERSION

_TEXTS = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
        "Summary: DeepSpeed's names, served by ds_core (dscore-deepspeed-compat)\n"
    ),
    "top_level.txt": "deepspeed\n",
    "INSTALLER": "dscore-deepspeed-compat\n",
}


class ServedDistribution(Distribution):
    """Has a name and a version, and no files."""

    def read_text(self, filename: Any) -> str | None:
        """One of the texts of a distribution."""
        return _TEXTS.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        """Where a file would be, if there were any."""
        return Path(__file__).with_name(str(path))
