"""What dscore-plan offers: the command ``dscore plan`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore plan``."""
    text = "Predict what each rank holds and sends under every stage of ZeRO, and recommend one."
    return {"plan": CommandEntry("ds_plan.command:plan", text)}
