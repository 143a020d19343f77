"""A model as a sequence of layers, of which each rank builds only its stage's.

Parameters are named by layer, ``layers.7.weight`` (those of tied layers by key,
``tied.embed.weight``), whatever the number of stages: so checkpoints fit any number, and a plain
module with the same names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.entries import Axis
from ds_core.errors import UsageError
from ds_core.mesh import Mesh, plan_mesh
from ds_pipeline.config import overridden
from ds_pipeline.layers.balance import partition
from ds_pipeline.layers.layer_files import LayerFiles
from ds_pipeline.layers.layer_times import measure
from ds_pipeline.layers.specs import Layer as Layer
from ds_pipeline.layers.specs import LayerSpec as LayerSpec
from ds_pipeline.layers.specs import TiedLayerSpec as TiedLayerSpec
from ds_pipeline.layers.specs import (
    count_parameters,
    make_layer,
    make_trial,
    name_of,
    sections_of,
)
from ds_pipeline.layers.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)

AXES = {"pp": "pipe", "dp": "data", "tp": "model"}
ALWAYS_RECOMPUTED = "ParallelTransformerLayerPipe"
INSTEAD = {
    "allreduce_tied_weight_gradients": "train_batch sums the gradients of tied weights over their "
    "stages",
}
"""Names of DeepSpeed's module -> what there is instead."""


class PipelineModule(LayerFiles, nn.Module):
    """`layers`, each output being the next input, cut into stages of which this rank has one.

    layers: modules, `LayerSpec`, `TiedLayerSpec` and functions, or an ``nn.Sequential``. Inputs and
        outputs are a tensor or a tuple of tensors.
    loss_fn: ``(outputs, labels) -> loss``, on the last stage; without it the last output is the
        loss.
    dynamic_shape: shapes may change from micro-batch to micro-batch in ways that the inputs of the
        model do not show.

    How it is cut:

    num_stages, or topology: one is needed; the world must be a multiple of the stages, and what is
        left becomes data parallelism.
    chunks: parts of the model per stage, for the interleaved schedule.
        DS_CONFIG_OVERRIDES, of which `ds_core.initialize` takes keys in place of the config's, does
        the same here: ``stages`` and ``chunks`` of its section ``pipeline`` stand in place of
        num_stages (and of topology) and chunks.
    partition_method: see `ds_pipeline.layers.balance`.
    example: one input of the model, for partition_method "profile".

    Random numbers:

    seed_layers: layer i is built under seed base_seed + i, and runs under base_seed * micro-batch +
        i.
    seed_fn: sets a seed (default torch.manual_seed).

    Activation checkpointing:

    activation_checkpoint_interval: layers that are checkpointed together; 0: none are.
    activation_checkpoint_func: ``(function, *inputs)``, in the place of torch's checkpoint.
    checkpointable_layers: class names of layers that may be; None: all with parameters.

    Every rank builds it with the same arguments, before `ds_core.initialize`.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        chunks: int = 1,
        example: Any = None,
    ) -> None:
        super().__init__()
        num_stages, topology, chunks = _as_overridden(num_stages, topology, chunks)
        if num_stages is None and topology is None:
            raise UsageError("PipelineModule needs num_stages or topology")
        self.num_stages = int(num_stages if num_stages is not None else topology.get_dim("pipe"))  # type: ignore[union-attr]
        rank, world = _distributed()
        self.stage_id = plan_mesh([Axis("pp", self.num_stages, outermost=True)], world, rank).coord[
            "pp"
        ]
        self._given_topology = topology
        self._grid = PipelineParallelGrid(self._checked(topology, world), rank=rank)
        self.chunks = chunks
        self.dynamic_shape = dynamic_shape
        self.seed_layers = seed_layers
        self.base_seed = base_seed
        self.seed_fn = seed_fn or torch.manual_seed
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.use_reentrant = False
        specs: list[Layer] = list(layers)
        self._check_layers(len(specs))
        self.parts = self._partition(specs, example)
        self._check_shared(specs)
        self._sections_of_others = sections_of(self._of_other_stages(specs))
        self.layers = nn.ModuleDict()
        self.tied = nn.ModuleDict()
        self._chunks = [
            self._build(specs, c * self.num_stages + self.stage_id) for c in range(chunks)
        ]
        self.tied_attrs: dict[str, set[str]] = {}
        self.tied_stages = self._find_ties(specs)
        self.loss_fn = loss_fn if self.is_last_stage() else None
        self.has_loss = loss_fn is not None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.cut_batch: Callable[[Any, Any], tuple[Any, Any]] | None = None
        """Set by a transform where ranks work on parts of samples: (inputs, labels) -> this rank's
        parts.
        """
        self._micro_offsets = [0] * chunks
        self.shapes_known = False

    @property
    def ds_sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The section that loads the plugin and sets the size of its axis, and those for which
        layers of other stages ask.
        """
        own = {"pipeline": {"stages": self.num_stages, "chunks": self.chunks}}
        return {**self._sections_of_others, **own}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (instead := INSTEAD.get(name)) is None:
                raise
            raise AttributeError(f"a PipelineModule has no {name}: {instead}", name=name) from None

    # -- building ----------------------------------------------------------------------------------

    def _checked(self, topology: ProcessTopology | None, world: int) -> ProcessTopology:
        if topology is None:
            return PipeDataParallelTopology(self.num_stages, world // self.num_stages)
        if topology.world_size() != world or topology.get_dim("pipe") != self.num_stages:
            raise UsageError(
                f"the topology has {topology.world_size()} ranks in {topology.get_dim('pipe')} "
                "stages, this run "
                f"{world} in {self.num_stages}"
            )
        return topology

    def _check_layers(self, count: int) -> None:
        if count == 0:
            raise UsageError("PipelineModule was given no layers")
        if self.chunks < 1 or (self.chunks > 1 and count < self.chunks * self.num_stages):
            raise UsageError(
                f"{count} layers cannot make {self.chunks} chunks on each of {self.num_stages} "
                "stages; use fewer chunks"
            )

    def _partition(self, specs: Sequence[Layer], example: Any) -> list[int]:
        def times() -> Sequence[float]:
            if example is None:
                raise UsageError(
                    'partition_method "profile" needs example=, one input of the model'
                )
            comm.init_distributed(get_accelerator().communication_backend)
            found = (
                measure([functools.partial(make_trial, s) for s in specs], example)
                if comm.rank() == 0
                else None
            )
            return comm.all_gather_json(found)[0]  # type: ignore[no-any-return]

        names = [name_of(s) for s in specs]
        parts = self.num_stages * self.chunks
        try:
            return partition(
                self.partition_method,
                names,
                parts,
                lambda: [count_parameters(s) for s in specs],
                times,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def _of_other_stages(self, specs: Sequence[Layer]) -> list[Layer]:
        return [spec for i, spec in enumerate(specs) if self.stage_owner(i) != self.stage_id]

    def _check_shared(self, specs: Sequence[Layer]) -> None:
        """Raise UsageError for a module in two stages: its weight would silently become two."""
        owners: dict[Tensor, int] = {}
        for index, spec in enumerate(specs):
            for param in spec.parameters() if isinstance(spec, nn.Module) else ():
                stage = owners.setdefault(param, self.stage_owner(index))
                if stage != self.stage_owner(index):
                    raise UsageError(
                        f"layer {index} ({name_of(spec)}) on stage {self.stage_owner(index)} shares "
                        "a weight with a "
                        f"layer on stage {stage}; use TiedLayerSpec for both"
                    )

    def _build(self, specs: Sequence[Layer], part: int) -> list[tuple[int, Callable[[Any], Any]]]:
        """The layers of one part as callables, with their indices."""
        built: list[tuple[int, Callable[[Any], Any]]] = []
        for index in range(self.parts[part], self.parts[part + 1]):
            spec = specs[index]
            if isinstance(spec, TiedLayerSpec):
                first = next(
                    i
                    for i, s in enumerate(specs)
                    if isinstance(s, TiedLayerSpec) and s.key == spec.key
                )
                if spec.key not in self.tied:
                    self.tied[spec.key] = self._seeded(specs[first], first)
                module = self.tied[spec.key]
                call = (
                    functools.partial(spec.forward_fn, module)
                    if spec.forward_fn is not None
                    else module
                )
                built.append((index, call))
            elif isinstance(spec, (LayerSpec, nn.Module)):
                self.layers[str(index)] = self._seeded(spec, index)
                built.append((index, self.layers[str(index)]))
            else:
                built.append((index, spec))
        return built

    def _seeded(self, spec: Any, index: int) -> nn.Module:
        if not self.seed_layers or isinstance(spec, nn.Module):
            return make_layer(spec)  # type: ignore[no-any-return]
        with torch.random.fork_rng():
            self.seed_fn(self.base_seed + index)
            return make_layer(spec)  # type: ignore[no-any-return]

    def _find_ties(self, specs: Sequence[Layer]) -> dict[str, list[int]]:
        """For each key on several stages, those stages in order."""
        found: dict[str, set[int]] = {}
        for index, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                found.setdefault(spec.key, set()).add(self.stage_owner(index))
                self.tied_attrs.setdefault(spec.key, set()).update(spec.tied_weight_attr)
        return {key: sorted(stages) for key, stages in sorted(found.items()) if len(stages) > 1}

    def bind(self, mesh: Mesh) -> None:
        """Compare what was built with the run's mesh, and take its groups; called by
        `ds_core.initialize`.
        """
        if type(mesh) is not Mesh or not mesh.has("pp"):  # a plugin made it of the user's mpu
            raise UsageError("a PipelineModule brings its own mpu; call initialize without mpu=")
        if (mesh.size("pp"), mesh.coord["pp"]) != (self.num_stages, self.stage_id):
            here = f"stage {mesh.coord['pp']} of {mesh.size('pp')}"
            raise UsageError(
                f"rank {mesh.rank} built stage {self.stage_id} of {self.num_stages}, but the mesh "
                f"{mesh.describe()} "
                f"puts it on {here}; build the module in the process that trains it"
            )
        if self._given_topology is None:
            parts = dict.fromkeys(mesh.alias["dp"], "dp")
            names = list(dict.fromkeys(parts.get(n, n) for n in mesh.names))
            topology = ProcessTopology(
                [AXES.get(n, n) for n in names], [mesh.size(n) for n in names]
            )
            self._grid = PipelineParallelGrid(topology, rank=mesh.rank)
        elif self._grid.data_parallel_id != mesh.index(
            "dp"
        ) or self._grid.data_parallel_size != mesh.size("dp"):
            raise UsageError(
                f"the topology puts rank {mesh.rank} at data-parallel place "
                f"{self._grid.data_parallel_id} of "
                f"{self._grid.data_parallel_size}, the mesh {mesh.describe()} at "
                f"{mesh.index('dp')} of "
                f"{mesh.size('dp')}; leave topology out and give num_stages"
            )
        self._grid.bind(mesh)

    # -- running -----------------------------------------------------------------------------------

    def forward(self, forward_input: Any, *, chunk: int = 0) -> Any:
        """Run this stage's layers (of one chunk)."""
        self._micro_offsets[chunk] += 1
        layers = self._chunks[chunk]
        offset = self._micro_offsets[chunk]
        interval = self.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            return self._run(layers, offset, forward_input)
        out = forward_input
        for begin in range(0, len(layers), interval):
            group = layers[begin : begin + interval]
            run = functools.partial(self._run, group, offset)
            out = self._recompute(run, out) if self._may_recompute(group) else run(out)
        return out

    def _run(
        self, layers: Sequence[tuple[int, Callable[[Any], Any]]], offset: int, *inputs: Any
    ) -> Any:
        out = inputs[0] if len(inputs) == 1 else inputs
        for index, layer in layers:
            if self.seed_layers:
                self.seed_fn(self.base_seed * offset + index)
            out = layer(out)
        return out

    def _recompute(self, run: Callable[..., Any], given: Any) -> Any:
        if isinstance(given, tuple) and len(given) == 1:
            inner = run

            def run(x: Any) -> Any:
                return inner((x,))

        inputs = given if isinstance(given, tuple) else (given,)
        if self.activation_checkpoint_func is not None:
            return self.activation_checkpoint_func(run, *inputs)
        # The re-entrant kind gives no gradients where no input incoming one, as on the first stage.
        reentrant = self.use_reentrant and any(
            isinstance(t, Tensor) and t.requires_grad for t in inputs
        )
        return checkpoint(run, *inputs, use_reentrant=reentrant)

    def _may_recompute(self, group: Sequence[tuple[int, Any]]) -> bool:
        modules = [layer for _, layer in group]
        if any(type(m).__name__ == ALWAYS_RECOMPUTED for m in modules):
            return True
        if self.checkpointable_layers is not None:
            return all(type(m).__name__ in self.checkpointable_layers for m in modules)
        modules = [m.args[0] if isinstance(m, functools.partial) and m.args else m for m in modules]
        return any(
            isinstance(m, nn.Module) and next(m.parameters(), None) is not None for m in modules
        )

    def changes_inputs(self, chunk: int) -> bool:
        """Whether a module before the chunk's first weight works in place, as
        ``ReLU(inplace=True)`` does.
        """
        for _, layer in self._chunks[chunk]:
            for module in layer.modules() if isinstance(layer, nn.Module) else ():
                if getattr(module, "inplace", False):
                    return True
                if next(module.parameters(recurse=False), None) is not None:
                    return False
        return False

    def get_additional_losses(self) -> Mapping[str, Any] | None:
        """Override to report additional losses: ``{name: value}`` of the micro-batch whose forward
        has just run.
        """
        return None

    # -- telling -----------------------------------------------------------------------------------

    def topology(self) -> ProcessTopology:
        """Coordinates of all ranks."""
        return self._grid.topology

    def mpu(self) -> PipelineParallelGrid:
        """The grid, which has the getters of a Megatron-style mpu."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def partitions(self) -> list[int]:
        """The boundaries of the parts: part p has the layers from ``[p]`` to before ``[p + 1]``."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""
        for part in range(len(self.parts) - 1):
            if self.parts[part] <= layer_idx < self.parts[part + 1]:
                return part % self.num_stages
        raise UsageError(f"there is no layer {layer_idx}; the last is {self.parts[-1] - 1}")

    def is_first_stage(self) -> bool:
        """Whether this stage takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this stage makes the loss."""
        return self.stage_id == self.num_stages - 1

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Let `fn` change each micro-batch that comes from the iterator."""
        self.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Send shapes between stages again in the next batch (done automatically when the inputs'
        shapes change).
        """
        self.shapes_known = False


def _distributed() -> tuple[int, int]:
    """(rank, world size), of the process group if it runs, else as the launcher has set them."""
    if comm.is_initialized():
        return comm.rank(), comm.world_size()
    where = comm.find_rendezvous(os.environ)
    return (where.rank, where.world_size) if where is not None else (0, 1)


def _as_overridden(
    stages: int | None, topology: ProcessTopology | None, chunks: int
) -> tuple[int | None, ProcessTopology | None, int]:
    """What DS_CONFIG_OVERRIDES puts in the place of these arguments."""
    given = overridden()
    if "stages" in given:
        stages = given["stages"]
        topology = None
    return stages, topology, given.get("chunks", chunks)
