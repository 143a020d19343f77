"""The run of an inference engine: its ranks, and its model with layers divided over them.

It is what `ds_core.initialize` does of a training run, without what training needs: the same
plugins cut the same layers by the same rules, since sections `tensor_parallel` and
`expert_parallel` are made of the inference config.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ds_comm_autograd import gather
from ds_inference_kit.program import Collectives, Runnable
from ds_inference_kit.step import KVCache, Step
from ds_run_state.divided import divided
from torch import Tensor, nn

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.config import ConfigSource
from ds_core.context import Context
from ds_core.errors import ConfigError, Problem
from ds_core.mesh import Mesh
from ds_core.setup.compose import compose
from ds_core.setup.opening import open_run, transform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_inference.config import DeepSpeedInferenceConfig

log = logging.getLogger("ds_inference")


def sections(
    config: DeepSpeedInferenceConfig, model: nn.Module, rows: Sequence[str]
) -> dict[str, Any]:
    """What the config is in the words of a run: its sections.

    rows: names of linears whose outputs are summed.
    """
    raw: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if config.kernels:
        raw["kernels"] = dict(config.kernels)
    if config.tp_size > 1:
        raw["tensor_parallel"] = {
            "autotp_size": config.tp_size,
            "vocab_parallel_loss": False,
            "tensor_parallel": {"tp_grain_size": _grain(config, model)},
        }
        if rows:
            raw["tensor_parallel"]["injection_policy_tuple"] = list(rows)
    if config.ep_size > 1:
        raw["expert_parallel"] = {"enabled": True, "autoep_size": config.ep_size}
    return raw


def _grain(config: DeepSpeedInferenceConfig, model: nn.Module) -> int:
    """Where lengths are cut.

    The documented 64 is for GPUs; a model that is too small for it is cut anywhere.
    """
    given = config.tensor_parallel
    if "tp_grain_size" in given.model_fields_set:
        return given.tp_grain_size
    # A tiny model (tests, demos) would otherwise not be divisible at all.
    widths = [min(p.shape) for p in model.parameters() if p.dim() == 2]
    return (
        given.tp_grain_size if min(widths, default=0) >= given.tp_grain_size * config.tp_size else 1
    )


def make_context(
    config: DeepSpeedInferenceConfig, model: nn.Module, rows: Sequence[str], origin: str
) -> Context:
    """The run: plugins, mesh of ranks, kernels. Collective where there are several ranks."""
    chosen = compose(ConfigSource(sections(config, model, rows), origin), model)
    group = _given_group(config)
    if group is not None:
        # late: the user has set torch.distributed up, and with it the ranks' layout.
        ctx = open_run(chosen, lambda rank, world_size: GroupMesh(group), late=True)
    else:
        ctx = open_run(
            chosen, alone=all(axis.size == 1 for axis in chosen.plugins.mesh_axes(chosen.config))
        )
    ctx.accelerator.set_device(ctx.accelerator.local_index(comm.local_rank()))
    return ctx


def _given_group(config: DeepSpeedInferenceConfig) -> ProcessGroup | None:
    """The process group of the user's that divides layers.

    ConfigError where its size is another.
    """
    given = config.tensor_parallel
    group = given.tp_group
    if group is None and given.mpu is not None:
        getters = ("get_tensor_model_parallel_group", "get_model_parallel_group")
        # Megatron's objects have either name, by their version.
        get = next((g for name in getters if callable(g := getattr(given.mpu, name, None))), None)
        if get is None:
            raise ConfigError(
                f"the mpu, a {type(given.mpu).__name__}, has none of {', '.join(getters)}", "mpu"
            )
        group = get()
    if group is not None and (size := dist.get_world_size(group)) != config.tp_size:
        raise ConfigError(
            f"tp_size is {config.tp_size}, and the process group given has {size} ranks", "tp_group"
        )
    return group if config.tp_size > 1 else None


class GroupMesh(Mesh):
    """A mesh whose ranks along ``tp`` are those of a process group of the user's."""

    def __init__(self, group: ProcessGroup) -> None:
        size = dist.get_world_size(group)
        world = dist.get_world_size()
        if world % size:
            raise ConfigError(
                f"a process group of {size} ranks does not divide the world of {world}", "tp_group"
            )
        super().__init__(("dp", "tp"), (world // size, size), 0, {})
        self.rank = dist.get_rank()
        self._tp = group
        self.coord = {"dp": 0, "tp": dist.get_rank(group)}

    def build_groups(self, timeout: Any = None, *, own: bool = False) -> None:
        """Take the group that was given, and the world."""
        world = dist.group.WORLD
        assert world is not None
        self._groups = {("tp",): self._tp, ("dp", "tp"): world}
        # Here, where all ranks meet: a transport cannot be opened by one rank alone in a later
        # step.
        for group in self.groups():
            comm.open_transport(group)

    def ranks(self, *axes: str) -> list[int]:
        """The ranks of the group along `axes`; it may lay ranks out in any order."""
        group = self.group(*axes)
        return [self.rank] if group is ALONE else dist.get_process_group_ranks(group)


def divide(model: nn.Module, ctx: Context) -> nn.Module:
    """The model after the transforms of all plugins that take part. Collective."""
    ctx.module = model = transform(ctx, model)
    return model


# -- programs --------------------------------------------------------------------------------------


def collectives(model: nn.Module, group: ProcessGroup) -> Collectives:
    """What a program with `Reduce` and `Gather` calls."""
    # Output heads that are divided unevenly; a divided embedding is never gathered by a program
    # (`Embedded`).
    heads = [
        d
        for m in model.modules()
        if (d := divided(m)) is not None and d.gathers and not isinstance(m, nn.Embedding)
    ]
    sizes = {d.sizes[d.rank]: list(d.sizes) for d in heads}

    def reduce(x: Tensor) -> None:
        comm.all_reduce(x, group=group)

    def gather_columns(x: Tensor) -> Tensor:
        lengths = sizes.get(x.shape[1])
        return gather(x, group, -1, None if lengths is None or len(set(lengths)) == 1 else lengths)

    return Collectives(reduce, gather_columns)


def load(lowered: Any, model: nn.Module, ctx: Context, device: torch.device) -> Runnable:
    """The program of `model` on the fastest provider that serves its device and dtype."""
    dtype = str(lowered.program.dtype).removeprefix("torch.")
    provider = ctx.kernels.get("inference_program", device.type, dtype)
    # Only layers that `tp` divides have instructions for other ranks.
    several = ctx.mesh.has("tp") and ctx.mesh.size("tp") > 1
    given = collectives(model, ctx.mesh.group("tp")) if several else None
    runnable: Runnable = provider(lowered.program, given)
    embedding = getattr(lowered, "embedding", None)
    return (
        Embedded(runnable, embedding)
        if embedding is not None and divided(embedding) is not None
        else runnable
    )


def record(runnable: Runnable, what: str, key: str = "enable_cuda_graph") -> None:
    """Have steps recorded as CUDA graphs from now on.

    what, key: for the ConfigError where what serves cannot.
    """
    capture = getattr(
        runnable.runnable if isinstance(runnable, Embedded) else runnable, "capture", None
    )
    if capture is None:
        why = f"what serves {what} records no graphs; dscore-ops-cuda does"
        raise ConfigError([Problem(key, why, "leave the key out elsewhere")])
    capture()


class Embedded:
    """A runnable whose token embedding is divided over ranks: the module's layer makes the vectors
    of each step.
    """

    def __init__(self, runnable: Runnable, embedding: nn.Module) -> None:
        self.runnable = runnable
        self._embedding = embedding

    @torch.inference_mode()
    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        """See `Runnable`."""
        if step.embeds is None:
            step = replace(step, embeds=self._embedding(step.tokens))
        return self.runnable(step, cache)

    def rebind(self) -> None:
        """See `Runnable`."""
        self.runnable.rebind()


def one_seed(ctx: Context) -> int:
    """A seed for sampling, equal on all ranks that work on the same rows: drawn on the first of
    them.
    """
    seed = int(torch.randint(2**62, ()))
    # Ranks along other axes have rows of their own.
    axes = [axis for axis in ctx.mesh.names if axis in ("tp", "ep")]
    if ctx.mesh.size(*axes) == 1:
        return seed
    return int(comm.all_gather_json(seed, group=ctx.mesh.group(*axes))[0])
