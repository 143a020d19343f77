"""The section ``comet`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from ds_core.config import Section, option


class CometConfig(Section):
    """Recording with Comet.

    What is null comes from Comet's environment variables (COMET_API_KEY, ...) or its file.
    """

    writes_outside = ("enabled",)

    enabled: bool = option(False, "Record the run with Comet.")
    samples_log_interval: int = option(
        100, "Fewest samples between two values of a metric that are recorded.", gt=0
    )
    project: str | None = option(None, "Project of the experiment; null: COMET_PROJECT_NAME.")
    workspace: str | None = option(None, "Workspace of the project; null: COMET_WORKSPACE.")
    api_key: str | None = option(
        None, "Key of the account; null: COMET_API_KEY or Comet's file.", secret=True
    )
    experiment_name: str | None = option(
        None, "Name of the experiment; null: COMET_EXPERIMENT_NAME."
    )
    experiment_key: str | None = option(
        None,
        "Key of the experiment, 32 to 50 letters and digits; null: COMET_EXPERIMENT_KEY, or a new "
        "one.",
    )
    online: bool | None = option(
        None, "Send to Comet; false: write an archive for `comet upload`; null: true."
    )
    mode: Literal["get", "create", "get_or_create"] | None = option(
        None,
        "Continue the experiment of that key (get), make it (create), or either; null: "
        "get_or_create.",
    )

    @field_validator("experiment_key")
    @classmethod
    def _is_a_key(cls, value: str | None) -> str | None:
        if value is not None and not (
            value.isascii() and value.isalnum() and 32 <= len(value) <= 50
        ):
            raise ValueError("must be 32 to 50 letters and digits")
        return value
