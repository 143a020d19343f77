"""The declaration of dscore-config-formats (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import Ref


def ds_config_formats() -> Mapping[str, Ref]:
    """hjson, YAML and TOML."""
    return {
        ".hjson": "ds_config_formats.parsers:parse_hjson",
        ".yaml": "ds_config_formats.parsers:parse_yaml",
        ".yml": "ds_config_formats.parsers:parse_yaml",
        ".toml": "ds_config_formats.parsers:parse_toml",
    }
