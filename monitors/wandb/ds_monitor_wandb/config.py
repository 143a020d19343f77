"""The section ``wandb`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option


class WandbConfig(Section):
    """Recording with Weights & Biases.

    The key of the account is the package's affair: WANDB_API_KEY, or a log-in.
    """

    writes_outside = ("enabled",)

    enabled: bool = option(False, "Record the run with Weights & Biases.")
    group: str | None = option(None, "Group of runs that this one belongs to.")
    team: str | None = option(None, "Team (entity) that the run belongs to; null: your default.")
    project: str = option("deepspeed", "Project of the run.")
