"""``dscore run --record FOLDER`` (torch-free)."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping


def record_into(folder: str, words: list[str]) -> Mapping[str, str]:
    """The variable by which the config of the processes has the section ``run_record``."""
    from ds_core.config import read_config

    given = read_config(os.environ.get("DS_CONFIG_OVERRIDES") or {}).raw
    text = json.dumps({**given, "run_record": {"folder": os.path.abspath(folder)}})
    return {"DS_CONFIG_OVERRIDES": base64.urlsafe_b64encode(text.encode()).decode()}
