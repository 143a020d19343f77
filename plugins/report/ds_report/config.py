"""The section ``run_record`` (torch-free)."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator

from ds_core.config import Section, option


class RunRecord(Section):
    """Where a run keeps its record, which ``dscore report`` and ``dscore top`` read."""

    writes_outside = ("enabled",)

    enabled: bool = option(True, "Write the record.")
    folder: str = option("runs/run", "Folder of the record; a resumed run appends.")
    seconds: float = option(1.0, "How often each rank writes, in the background.", gt=0, le=3600)
    total_steps: int | None = option(
        None,
        "Planned optimizer steps, for the time left; null: total_num_steps of the schedule, if it "
        "has one.",
        gt=0,
    )

    @field_validator("folder")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if not value or "\0" in value:
            raise ValueError("must name a folder")
        return value

    def directory(self) -> Path:
        """The absolute folder; a later change of the working directory does not move it."""
        return (Path.cwd() / Path(self.folder).expanduser()).absolute()
