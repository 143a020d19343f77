"""``dscore run --record FOLDER`` (torch-free)."""

from __future__ import annotations

import os
from collections.abc import Mapping


def record_into(folder: str, words: list[str]) -> Mapping[str, str]:
    """The variable by which the config of the processes has the section ``run_record``."""
    from ds_command_kit.overrides import VARIABLE, encode, held

    return {VARIABLE: encode({**held(), "run_record": {"folder": os.path.abspath(folder)}})}
