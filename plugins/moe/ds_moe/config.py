"""The section ``expert_parallel`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option

__all__ = ["ExpertParallelConfig"]


class ExpertParallelConfig(Section):
    """Expert parallelism. `ds_moe.MoE` layers ask for the section by themselves, with their ep_size."""

    enabled: bool = option(False, "Replace the MoE blocks of a Hugging Face model by expert-parallel ones (AutoEP).")
    autoep_size: int = option(
        1, "Expert-parallel ranks: over so many neighbouring data-parallel ranks experts are divided.", ge=1
    )
