"""``engine.optimizer`` as DeepSpeed has it: the torch optimizer inside, and what scripts read of
the one around it.

An optimizer of plain data parallelism in fp32 is given as it is, as DeepSpeed gives it. Else it is
wrapped in a class that says what holds the states, so that `isinstance` answers as with DeepSpeed.
The wrapper has no state of its own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_core.errors import UsageError
from ds_deepspeed_compat.engines import engine_methods
from ds_deepspeed_compat.engines.loss_scaler import view_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core import Engine
    from ds_deepspeed_compat.engines.loss_scaler import LossScalerBase


class DeepSpeedOptimizer(Optimizer):
    """A torch optimizer whose ``optimizer`` does the work; groups and states are that one's."""

    # not the base's: nothing is its own
    def __init__(self, engine: Engine, groups: list[list[nn.Parameter]]) -> None:
        assert engine.optimizer is not None
        self._engine = engine
        self.optimizer = engine.optimizer
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_engine", "_groups"):  # while it is being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups that are updated; under ZeRO their tensors are this rank's shards."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The states by tensor."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """``engine.step()``, for loops that call the optimizer's (Fabric's)."""
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) is not possible: call engine.backward(loss), then "
                "engine.step()"
            )
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """``engine.backward`` of a loss that has been divided by the accumulation steps already."""
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def state_dict(self) -> dict[str, Any]:
        """The states that this rank holds; checkpoints are `Engine.save_checkpoint`'s."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Put back what `state_dict` gave on this rank."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch's."""
        self.optimizer.add_param_group(param_group)

    @property
    def _opt_called(self) -> bool:
        """What torch's schedules ask before they warn that no update went before their first
        step."""
        return self._engine.global_steps > 0

    @_opt_called.setter
    def _opt_called(self, value: bool) -> None:
        pass

    # -- what scripts read -------------------------------------------------------------------------

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped, since gradients were not finite."""
        norm = self._engine.get_global_grad_norm()
        return norm is not None and not math.isfinite(norm)

    @property
    def loss_scale(self) -> float:
        """The loss scale now; 1 without fp16."""
        return self._engine.loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return engine_methods.dynamic_loss_scale(self._engine)

    @property
    def loss_scaler(self) -> LossScalerBase:
        """The loss scale as an object."""
        return view_of(self._engine, dynamic=self.dynamic_loss_scale)

    @property
    def clip_grad(self) -> float:
        """The limit of the gradient norm; 0: none."""
        return self._engine.config.core.gradient_clipping

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._engine.gradient_accumulation_steps()

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters that are trained, group by group."""
        return self._groups

    fp16_groups = bit16_groups

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """A flat copy of each group's weights, as this rank holds them."""
        return [
            torch.cat([p.detach().reshape(-1) for p in group]) for group in self._groups if group
        ]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The tensors that this rank updates."""
        return [p for group in self.param_groups for p in group["params"]]


class FP16_Optimizer(DeepSpeedOptimizer):
    """In fp16 without ZeRO."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """In fp16 without ZeRO, for LAMB; `FP16_Optimizer` here does both."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Its states are sharded."""

    @property
    def dp_process_group(self) -> ProcessGroup:
        """The ranks among which states are sharded."""
        from ds_deepspeed_compat.utils.groups import group_of

        return group_of(self._engine.ctx.mesh, "dp")

    @property
    def partition_gradients(self) -> bool:
        """Whether gradients are sharded too."""
        return engine_methods.zero_optimization_partition_gradients(self._engine)

    @property
    def cpu_offload(self) -> bool:
        """Whether the states rest on the host."""
        return engine_methods.zero_cpu_offload(self._engine)

    @property
    def accumulated_grads_in_cpu(self) -> dict[int, Tensor]:
        """This rank's part of the reduced gradients, by the parameter's number in `bit16_groups`;
        {} without offload.

        Changing the dict changes no gradient.
        """
        locate = getattr(self._engine.partitioner, "locate", None) if self.cpu_offload else None
        if locate is None:
            return {}
        # The partitioner knows which range of each parameter this rank updates.
        shards = (locate(param) for group in self._groups for param in group)
        grads = {i: shard.reduced() for i, shard in enumerate(shards) if shard is not None}
        return {i: grad.detach() for i, grad in grads.items() if grad is not None}


class BF16_Optimizer(ZeROOptimizer):
    """In bf16 without ZeRO, or with stage 1 and gradients that accumulate in fp32."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """ZeRO stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """ZeRO stage 3."""

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._engine.module

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """The tensors that this rank updates."""
        return self.single_partition_of_fp32_groups

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The leaf modules, each with those of its parameters that are trained."""
        trained = {param for group in self._groups for param in group}
        found: dict[nn.Module, list[nn.Parameter]] = {}
        for leaf in importlib.import_module("ds_zero").get_z3_leaf_modules(self.module):
            # A parameter that two leaves share belongs to the first.
            found[leaf] = [p for p in leaf.parameters() if p in trained]
            trained.difference_update(found[leaf])
        return {leaf: params for leaf, params in found.items() if params}

    @property
    def parameter_offload(self) -> _Gathering:
        """What gathers parameters, for code that lifts DeepSpeed's hooks around a generation."""
        return _Gathering(self._engine.module)


class _Gathering:
    """DeepSpeed's object behind stage 3.

    No hook is to be lifted: inside ``GatheredParameters`` nothing is gathered.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _Listed(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing was lifted."""


class _Listed:
    """A module's parameters, as that code lists them."""

    def __init__(self, module: nn.Module) -> None:
        self.named_parameters = module.named_parameters

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


def wrapped(engine: Engine, groups: list[list[nn.Parameter]]) -> Optimizer | None:
    """What ``engine.optimizer`` is with DeepSpeed.

    groups: the model's parameters that are trained, group by group.
    """
    if engine.optimizer is None:
        return None
    # Scripts ask by isinstance what holds the states: the classes are DeepSpeed's, by stage and
    # precision.
    stage = engine_methods.zero_optimization_stage(engine)
    core = engine.config.core
    kinds: dict[int, type[DeepSpeedOptimizer]] = {
        1: DeepSpeedZeroOptimizer,
        2: DeepSpeedZeroOptimizer,
        3: DeepSpeedZeroOptimizer_Stage3,
    }
    kind = kinds.get(stage) or (
        FP16_Optimizer if core.fp16.enabled else BF16_Optimizer if core.bf16.enabled else None
    )
    return engine.optimizer if kind is None else kind(engine, groups)
