"""The optimizer of an engine as torch's tools know one: its states by the module's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from ds_access.param_shard import HasWholeStates
from ds_access.states import locate
from ds_run_state import HasRankState
from ds_run_state.states import HasOwnedStates, set_optimizer_state
from ds_state_stores import is_evicted
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_core import comm
from ds_core.errors import UsageError
from ds_dtensor.kinds import Expected, Kind, kinds_here
from ds_dtensor.loading import Given, Source, agree, given
from ds_dtensor.places import Places, alike, full_shape, slice_of, take

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard

    from ds_core.engine import Engine

_OF_THIS_RUN = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Entries of a group that say how this run computes, not what."""


class EngineOptimizer(Optimizer):
    """`engine.optimizer`, for `torch.distributed.checkpoint.state_dict`.

    Its groups have the module's parameters, and its states are views of those of the engine's
    optimizer: of sharded ones DTensors. It is made where it is needed, and shows the states that
    there are then:
    ``get_optimizer_state_dict(engine, EngineOptimizer(engine))``. States that have not begun are
    zeros, which `load_state_dict` puts in place.

    `step` and `zero_grad` are the engine's.

    Every rank makes it (collective). Raises UsageError for optimizers that keep other states than
    one value per element, one per parameter, or those of one rank that updates all of a parameter.
    """

    def __init__(self, engine: Engine) -> None:
        optimizer = engine.optimizer
        if optimizer is None:
            raise UsageError("EngineOptimizer: the engine has no optimizer")
        for kind, what in (
            (HasOwnedStates, "states that are no parameter's"),
            (HasWholeStates, "states of full matrices"),
            (HasRankState, "a state of each rank's own"),
        ):
            if isinstance(optimizer, kind):
                raise UsageError(
                    f"EngineOptimizer and optimizer.type {type(optimizer).__name__!r} do not go "
                    f"together: it keeps {what}; use engine.save_checkpoint"
                )
        self._engine = engine
        self._places = Places(engine, wraps=False)
        super().__init__(list(self._groups()), {})
        # torch asks it for the names of states.
        self.state: Any = self._states()

    def _groups(self) -> Iterable[dict[str, Any]]:
        """The engine's groups, with the module's parameters."""
        params = iter(self._engine.ctx.trained)
        for group in self._engine.param_groups():
            mine = [next(params) for _ in group["params"]]
            yield {**group, "params": mine}

    def _held(self, param: nn.Parameter) -> ParamShard:
        held = locate(self._engine, param)
        assert held is not None
        return held

    def _kinds(self) -> dict[str, dict[str, Kind]]:
        """What states each parameter has, on any rank. Collective."""
        optimizer = self._optimizer
        with alike():
            mine = {
                held.name: {k: v.row() for k, v in kinds_here(held, optimizer).items()}
                for held in map(self._held, self._engine.ctx.trained)
            }
        ranks = comm.all_gather_json(mine)
        found: dict[str, dict[str, Kind]] = {name: {} for name in mine}
        for rank in ranks:
            for name, kinds in rank.items():
                for key, row in kinds.items():
                    found[name].setdefault(key, Kind.of(row))
        begun = any(found.values())
        expected = Expected(optimizer)
        for held in map(self._held, self._engine.ctx.trained):
            if held.param.requires_grad and not found[held.name]:
                look = expected.unused if begun else expected.of
                found[held.name] = look(held)
        return found

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._engine.optimizer
        assert optimizer is not None
        return optimizer

    def _states(self) -> dict[nn.Parameter, dict[str, Any]]:
        kinds = self._kinds()
        with alike():
            return {param: self._views(param, kinds) for param in self._engine.ctx.trained}

    def _views(
        self, param: nn.Parameter, kinds: Mapping[str, Mapping[str, Kind]]
    ) -> dict[str, Any]:
        held = self._held(param)
        live = self._optimizer.state.get(held.updated, {})
        return {
            key: self._view(held, key, kind, live.get(key))
            for key, kind in kinds[held.name].items()
        }

    def _view(self, held: ParamShard, key: str, kind: Kind, live: Any) -> Any:
        """A state as it is shown; live: what this rank has."""
        if kind.dtype is None:
            return kind.value
        if kind.shape is not None and kind.shape:
            return self._own(held, key, kind, live)
        if kind.shape is not None:
            made = torch.tensor(kind.value, dtype=kind.dtype)
            return live.detach() if isinstance(live, Tensor) else made
        if not isinstance(live, Tensor):  # it has not begun, or this rank has no element
            live = torch.zeros_like(held.updated, dtype=kind.dtype)
        return self._places.trained(held, live)

    def _own(self, held: ParamShard, key: str, kind: Kind, live: Any) -> Tensor:
        """A state of another shape, on the rank that updates all of the parameter."""
        if slice_of(self._engine.ctx, held.name) is not None:
            raise UsageError(
                f"EngineOptimizer: state {key!r} of {held.name!r} has another shape, "
                f"{kind.shape}, and 'tensor_parallel' divides the parameter; use "
                "engine.save_checkpoint"
            )
        assert kind.shape is not None and kind.dtype is not None
        if held.copied(held.updated_ranges):
            assert isinstance(live, Tensor)
            return live.detach()
        return self._places.owned(kind.shape, kind.dtype, live)

    # -- torch's methods ---------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`, of views. Collective."""
        self.state = self._states()
        numbers = {param: i for i, param in enumerate(self._engine.ctx.trained)}
        groups = [
            {**group, "params": [numbers[p] for p in group["params"]]} for group in self._groups()
        ]
        return {
            "state": {numbers[p]: state for p, state in self.state.items() if state},
            "param_groups": groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put states and hyperparameters into the engine's optimizer.

        state_dict: as `state_dict` gives it, whose tensors may also be whole, or DTensors of any
            layout. A parameter without an entry begins anew.

        Collective. UsageError, on every rank and before anything has changed, for what does not
        fit.
        """
        saved = list(chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        trained = self._engine.ctx.trained
        if len(saved) != len(trained):
            raise UsageError(
                f"EngineOptimizer.load_state_dict: {len(saved)} parameters there, and "
                f"{len(trained)} here"
            )
        entries = dict(zip(trained, (state_dict["state"].get(k, {}) for k in saved), strict=True))
        sources = self._sources(entries)
        for param, states in sources.items():
            self._put(self._held(param), states)
        groups = self._engine.param_groups()
        for group, values in zip(groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k in group and k not in _OF_THIS_RUN})
        self.state = self._states()

    def _sources(
        self, entries: Mapping[nn.Parameter, Mapping[str, Any]]
    ) -> dict[nn.Parameter, dict[str, Source]]:
        rows: dict[str, tuple[Any, Given]] = {}
        where: dict[str, tuple[nn.Parameter, str]] = {}
        # All ranks in one order, also where a rank was given nothing.
        names = comm.all_gather_json([sorted(state) for state in entries.values()])
        for place, (param, state) in enumerate(entries.items()):
            for key in sorted({k for rank in names for k in rank[place]}):
                name = f"{key} of {self._held(param).name}"
                rows[name] = (state.get(key), self._given(param, key, state.get(key)))
                where[name] = (param, key)
        agreed, wrong = agree(rows)
        if wrong:
            raise UsageError("EngineOptimizer.load_state_dict:\n\t" + "\n\t".join(wrong))
        found: dict[nn.Parameter, dict[str, Source]] = {param: {} for param in entries}
        for name, source in agreed.items():
            param, key = where[name]
            found[param][key] = source
        return found

    def _given(self, param: nn.Parameter, key: str, value: Any) -> Given:
        held = self._held(param)
        shape = full_shape(self._engine.ctx, held.name, held.shape)
        if value is None:
            return Given.MISSING
        if not isinstance(value, Tensor) or (value.dim() == 0 and (shape or key == "step")):
            return Given.WHOLE
        mine = self.state.get(param, {}).get(key)
        if isinstance(mine, Tensor):
            return given(value, mine.shape, mine)
        return given(value, shape, torch.empty(0))

    def _put(self, held: ParamShard, states: Mapping[str, Source]) -> None:
        """Make `states` those of a parameter."""
        optimizer = self._optimizer
        live = optimizer.state.get(held.updated, {})
        if not states:
            optimizer.state.pop(held.updated, None)
            return
        start, stop = held.updated_ranges[held.index]
        new: dict[str, Tensor] = {}
        for key, source in states.items():
            value = self._value(held, key, source)
            if start == stop and held.shape.count(0) == 0:
                continue  # a rank without elements has no state
            if not isinstance(value, Tensor):
                optimizer.state[held.updated][key] = value
            elif isinstance(old := live.get(key), Tensor):
                held.write(old, value.to(old.dtype))
            else:
                new[key] = value.clone()
        if new and is_evicted(held.updated):
            raise UsageError(
                f"EngineOptimizer: the states of {held.name!r} have not begun, and rest on a disk; "
                "use engine.load_checkpoint"
            )
        if new:
            set_optimizer_state(optimizer, held.updated, new)

    def _value(self, held: ParamShard, key: str, source: Source) -> Any:
        """What of a state is this rank's. Collective where it is not here."""
        value = source.value
        shape = full_shape(self._engine.ctx, held.name, held.shape)
        if source.kind is Given.HERE:
            local = value._local_tensor
            return local.view(held.updated.shape) if tuple(value.shape) == shape else local
        if not isinstance(value, Tensor) and source.first is None:
            return value
        mine = self.state.get(held.param, {}).get(key)
        like = mine if isinstance(mine, Tensor) else held.updated
        single = isinstance(mine, Tensor) and mine.dim() == 0 and (shape or key == "step")
        device = self._engine.ctx.accelerator.current_device()
        wanted = like.shape if isinstance(mine, Tensor) else shape
        full = source.full(wanted, like.dtype, device)
        if single or tuple(full.shape) != shape:
            return full
        local = take(self._engine.ctx, held.name, full)
        start, stop = held.updated_ranges[held.index]
        return local.reshape(-1)[start:stop].view(held.updated.shape)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not here: the engine steps."""
        raise UsageError("EngineOptimizer shows states; call engine.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, as `engine.zero_grad`."""
        self._engine.zero_grad(set_to_none)
