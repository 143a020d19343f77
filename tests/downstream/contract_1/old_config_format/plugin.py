"""The declaration of old-config-format: a format of config files (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping


def ds_config_formats() -> Mapping[str, str]:
    """By the suffix of a file: a function text -> data."""
    return {".old_config_format": "old_config_format.parse:parse"}
