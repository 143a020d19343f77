"""The section ``seq_parallel_communication_data_type``: the dtype in which gradients travel (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, RootModel

from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig

__all__ = ["SequenceCommunicationDtype", "ds_check", "ds_config"]

_SPELLINGS = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


class SequenceCommunicationDtype(
    RootModel[Literal["fp32", "fp16", "bf16", "float32", "float", "float16", "half", "bfloat16", "torch.float32"]]
):
    """The dtype in which gradients are reduced over ranks of a sequence: that of all data-parallel ranks."""

    model_config = ConfigDict(strict=True, frozen=True)


def ds_config() -> type[BaseModel]:
    """The section ``seq_parallel_communication_data_type``."""
    return SequenceCommunicationDtype


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """Gradients travel once, over all data-parallel ranks, those of a sequence among them: in one dtype."""
    section = config.section(SequenceCommunicationDtype)
    if section is None:
        return
    asked = section.root.removeprefix("torch.")
    asked = _SPELLINGS.get(asked, asked)
    if asked not in ("fp32", config.core.communication_data_type):
        why = f"{section.root!r}: gradients are reduced over sp and dp at once, in communication_data_type"
        yield Problem("seq_parallel_communication_data_type", why, f'set "communication_data_type": "{asked}"')
