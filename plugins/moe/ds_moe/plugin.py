"""What this distribution offers to ds_core: the section ``expert_parallel``, its axis, its
transform (torch-free).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Axis, KernelEntry, Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    """The section ``expert_parallel``."""
    from ds_moe.config import ExpertParallelConfig

    return ExpertParallelConfig


def ds_kernels() -> Iterable[KernelEntry]:
    """Feed-forward experts in one piece: ``(rows, FFN, weights, groups) -> rows``, see
    `ds_moe.ffn.ffn`; who goes where, weighted sums and their way back, see `plan`, `sums` and
    `weigh_back` of `ds_moe.dispatch`."""

    for function in ("ffn", "plan", "sums", "weigh_back"):
        op = f"expert_{function}"
        module = "ds_moe.ffn" if function == "ffn" else "ds_moe.dispatch"
        yield KernelEntry(
            op, "reference", f"{module}:{function}", 0, check=f"ds_moe.kernels.checks:{op}"
        )
        yield KernelEntry(
            op,
            "cpp",
            f"ds_moe.kernels.compiled:{function}",
            10,
            devices=("cpu",),
            # A plan has integers only, so it does not depend on the dtype of tokens.
            dtypes=() if function == "plan" else ("float32",),
            available="ds_moe.kernels.compiled:available",
            build="ds_moe.kernels.extension:EXTENSION",
            check=f"ds_moe.kernels.checks:{op}",
        )


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """``ep``, folded inside dp: each rank has different tokens."""
    from ds_moe.config import ExpertParallelConfig

    section = config.section(ExpertParallelConfig)
    return [Axis("ep", section.autoep_size if section is not None else 1, inside="dp")]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    """``ep`` for parameters of which each rank has a slice, or only some ranks have; ``tp`` for
    sharded experts.
    """
    from ds_run_state.slices import SLICES

    from ds_moe.place_layers import EXPERT_PARALLEL, TENSOR_PARALLEL

    found = (ctx.stash.get(SLICES) or {}).get(name)
    axes = [] if found is None else list(found.axes)
    if name in (ctx.stash.get(EXPERT_PARALLEL) or ()):
        axes.append("ep")
    if ctx.mesh.has("tp") and name in (ctx.stash.get(TENSOR_PARALLEL) or ()):
        axes.append("tp")
    return axes


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """AutoEP replaces MoE blocks of the model; MoE layers take their place on the mesh."""
    from ds_moe.config import ExpertParallelConfig

    def bind(model):  # type: ignore[no-untyped-def]
        from ds_moe.place_layers import bind_layers

        return bind_layers(model, ctx)

    def replace(model):  # type: ignore[no-untyped-def]
        from ds_moe.autoep.transform import replace

        return replace(model, ctx)

    section = ctx.config.section(ExpertParallelConfig)
    auto = section is not None and section.enabled
    return [*([Transform(Phase.SUBSTITUTE, replace)] if auto else []), Transform(Phase.SHARD, bind)]


def ds_step_begin(ctx: Context) -> None:
    """Where nobody reads it, the load is no longer counted."""
    # False, and not None: before the first step it is not known whether someone reads.
    if ctx.engine.telemetry.collects is False:
        from ds_moe.expert_load import stop_counting

        stop_counting(ctx)


def ds_metrics(ctx: Context) -> Mapping[str, float]:
    """Experts' load. Collective."""
    from ds_moe.expert_load import loads_of_step

    return loads_of_step(ctx)
