"""The section ``elasticity``: the batch triple of a run from its number of ranks (torch-free)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.config import Batch, RunConfig
    from ds_core.context import Context
    from ds_core.engine import Loader, LoaderRequest
    from ds_core.errors import Problem
    from ds_elasticity.config import Elasticity

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def ds_config() -> type[Elasticity]:
    """The section ``elasticity``."""
    from ds_elasticity.config import Elasticity

    return Elasticity


def _switched_on(config: RunConfig) -> Elasticity | None:
    from ds_elasticity.config import Elasticity

    section = config.section(Elasticity)
    return section if section is not None and section.enabled else None


def ds_check(config: RunConfig) -> Iterator[Problem]:
    """Batch keys next to an elastic batch, and a scheduler that computed with another section."""
    from ds_core.errors import Problem
    from ds_elasticity.batches import scheduler_problems

    if (section := _switched_on(config)) is None:
        return
    for key in KEYS:
        if getattr(config.core, key) is not None and not section.ignore_non_elastic_batch_info:
            why = "elasticity is enabled and sets the batch sizes itself"
            yield Problem(
                key,
                why,
                "leave the key out, or set elasticity.ignore_non_elastic_batch_info to true",
            )
    yield from scheduler_problems(section)


def ds_batch(config: RunConfig, dp_world: int) -> Batch | None:
    """The triple for `dp_world` data-parallel ranks, where the section is enabled."""
    if (section := _switched_on(config)) is None:
        return None
    from ds_elasticity.batches import run_batch

    return run_batch(section, dp_world)


def ds_loader(ctx: Context, request: LoaderRequest) -> Loader | None:
    """The core's loader, over an order of samples whose batches are the same at every number of
    ranks.

    For the training data, where the user has no sampler, and no other plugin makes loaders; data
    that cannot be indexed comes as it comes.
    """
    import dataclasses

    from torch.utils.data import IterableDataset

    from ds_core.engine import DistributedLoader
    from ds_elasticity.loader import WholeBatches

    # The user's sampler, or another plugin's loader, decides about the order then.
    own = request.sampler is not None or isinstance(request.dataset, IterableDataset)
    own |= len(ctx.plugins.implementing("ds_loader")) > 1
    if (
        _switched_on(ctx.config) is None
        or own
        or request.route != "train"
        or request.batch_size != ctx.batch.micro
    ):
        return None
    return DistributedLoader(
        dataclasses.replace(request, sampler=WholeBatches(request, ctx.batch.train))
    )
