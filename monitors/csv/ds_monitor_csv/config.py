"""The section ``csv_monitor`` (torch-free)."""

from __future__ import annotations

import re
from pathlib import Path, PureWindowsPath

from pydantic import field_validator

from ds_core.config import Section, option

__all__ = ["CSVConfig"]


class CSVConfig(Section):
    """Where the CSV monitor writes, and whether."""

    enabled: bool = option(False, "Write metrics to CSV files.")
    output_path: str = option("", "Folder to write below; empty: the folder that training was launched in.")
    job_name: str = option("DeepSpeedJobName", "Name of this job: a new folder inside output_path.")

    @field_validator("output_path")
    @classmethod
    def _no_nul(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path cannot hold a NUL character")
        return value

    @field_validator("job_name")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        parts = re.split(r"[/\\]", value)
        if any(part in ("", ".", "..") for part in parts) or PureWindowsPath(value).drive or "\0" in value:
            raise ValueError(
                "must name a folder inside output_path, such as run1 or team/run1; use output_path to go elsewhere"
            )
        return value

    def directory(self) -> Path:
        """The absolute folder of the job's files; a later change of the working directory does not move it."""
        return (Path.cwd() / Path(self.output_path).expanduser() / self.job_name).absolute()
