"""Declares ``dscore serve`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore serve``."""
    return {
        "serve": CommandEntry(
            "ds_inference.serve.command:serve", "Serve a model over HTTP, in OpenAI's protocol."
        )
    }
