"""All that a resumed run needs, as one record: what checkpointers save and load.

Tensors of the model and the optimizer are pieces of named states (`StateTensor`), each element
stored once over all ranks; everything else is plain values that may hold small tensors.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import CheckpointError
from ds_run_state import rng
from ds_run_state.slices import SLICES, shares, unslice
from ds_run_state.states import HasOwnedStates, states_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.engine import LoadOptions, RunningEngine
    from ds_run_state.states import HasStates, StateSource, StateTensor

log = logging.getLogger("ds_run_state")

COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


@runtime_checkable
class HasRankState(Protocol):
    """An optimizer with a state that is this rank's own, such as the errors of compressed
    communication.
    """

    def rank_state_dict(self) -> dict[str, Any]:
        """Values and tensors, kept among this rank's own values."""

    def load_rank_state_dict(self, state: Mapping[str, Any]) -> None:
        """Called after all other states are loaded, and only if each rank has the parameters that
        it had then.
        """


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint, as `RunState.restore` takes it.

    states: the tensors.
    common, local: what the methods of `RunState` gave; local is another rank's where `own` is False
        (there were fewer ranks).
    world_size: when it was saved.
    partial: weights were left out on purpose.
    shared: further name -> name of module tensors that share memory.
    """

    states: StateSource
    common: Mapping[str, Any]
    local: Mapping[str, Any]
    own: bool
    world_size: int
    partial: bool = False
    shared: Mapping[str, str] = field(default_factory=dict)


class RunState:
    """The state of an engine's run, to save and to load.

    Its methods are not collective, but for `restore`.
    """

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine

    @property
    def ctx(self) -> Context:
        """The run."""
        return self._engine.ctx

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._engine.module

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, if any."""
        return self._engine.optimizer

    @property
    def _owner(self) -> HasStates:
        return states_of(self._engine.partitioner)

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._engine.global_steps

    @property
    def not_exported(self) -> str:
        """Why the weights are not to be exported, where the config says so."""
        return getattr(self._engine.partitioner, "not_exported", "")

    # -- saving ------------------------------------------------------------------------------------

    def pieces(self, *, exclude: Sequence[str] = ()) -> Iterator[StateTensor]:
        """The pieces that this rank is to save: over all ranks every element once.

        exclude: names of states.
        """
        left_out = set(exclude)
        return shares(
            (p for p in self.states(self.optimizer) if p.name not in left_out), self.ctx.mesh
        )

    def states(self, optimizer: Optimizer | None = None) -> Iterator[StateTensor]:
        """All pieces that this rank holds, of the weights and buffers and of the states of
        `optimizer`.
        """
        found = unslice(self._owner.states(optimizer), self.ctx.stash.get(SLICES), self.ctx.mesh)
        owned = optimizer.owned_states() if isinstance(optimizer, HasOwnedStates) else ()
        return itertools.chain(found, owned)

    def frozen_states(self) -> list[str]:
        """The names that ``exclude_frozen_parameters`` leaves out."""
        names = [info.name for param, info in self.ctx.params.items() if not param.requires_grad]
        return [f"{kind}/{name}" for name in names for kind in ("module", "master")]

    def common(self) -> dict[str, Any]:
        """Equal on all ranks: counters, loss scaler, hyperparameters, schedule, data position."""
        engine = self._engine
        hooks = engine.partitioner.gradient_hooks
        loader = engine.training_dataloader
        return {
            **{counter: getattr(engine, counter) for counter in COUNTERS},
            # A checkpoint holds no half-summed gradients, so a window that is not complete will run
            # again, on its data.
            "micro_steps": engine.micro_steps - hooks.window.micros,
            "scaler": engine.scaler.state_dict() if engine.scaler is not None else None,
            "optimizer_groups": [
                {k: v for k, v in g.items() if k != "params"} for g in engine.param_groups()
            ],
            "optimizer_params": self._optimizer_params(),
            "lr_scheduler": engine.lr_scheduler.state_dict()
            if engine.lr_scheduler is not None
            else None,
            "data": hooks.window.data
            if hooks.unfinished or loader is None
            else loader.state_dict(),
        }

    def _optimizer_params(self) -> list[list[str]]:
        """The names of the parameters of each group, in order: other programs store optimizer
        states by place.
        """
        names = (self.ctx.params[param].name for param in self.ctx.trained)
        return [
            list(itertools.islice(names, len(group["params"])))
            for group in self._engine.param_groups()
        ]

    def local(self) -> dict[str, Any]:
        """This rank's own: random states, states of plugins and of modules, buffers, the
        optimizer's plain values.

        Buffers are saved as pieces by one rank, and here by the others, where they may differ:
        running statistics see each rank's own data.
        """
        optimizer = self.optimizer
        return {
            "random": rng.capture(self.ctx.accelerator),
            "layout": self._layout(),
            "plugins": {
                name: item.state_dict() for name, item in _plugin_objects(self.ctx).items()
            },
            "module_extra": {name: m.get_extra_state() for name, m in self.extra_modules().items()},
            "optimizer": _optimizer_values(optimizer),
            "optimizer_rank": optimizer.rank_state_dict()
            if isinstance(optimizer, HasRankState)
            else None,
            "optimizer_place": self._place(),
            "buffers": {
                n: b
                for n, b in persistent_buffers(self.module).items()
                if self.first_holder(n) != self.rank
            },
        }

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.ctx.rank

    def first_holder(self, buffer: str) -> int:
        """The rank whose values of a buffer are saved as a piece."""
        # None: one that came after initialize
        mesh = self.ctx.mesh
        info = self.ctx.buffers.get(buffer)
        held = info.held if info is not None else ()
        return mesh.ranks(*(axis for axis in mesh.expand(mesh.names) if axis not in held))[0]

    def extra_modules(self) -> dict[str, nn.Module]:
        """The modules, by name, that keep a state of their own with ``get_extra_state``."""
        plain = nn.Module.get_extra_state
        return {
            name: m
            for name, m in self.module.named_modules()
            if type(m).get_extra_state is not plain
        }

    # -- loading -----------------------------------------------------------------------------------

    def check(
        self, states: StateSource, options: LoadOptions, *, excluded: Sequence[str] = ()
    ) -> list[str]:
        """Raise CheckpointError where a weight is missing or a state has another shape than on this
        rank.

        excluded: states that were left out on purpose.

        Returns the weights that this rank has no place for.
        """
        optimizer = self.optimizer if options.optimizer and not options.module_only else None
        mine = {state.name: tuple(state.shape) for state in self._owner.states(optimizer)}
        if options.custom is not None:
            return []
        saved = set(states.names())
        missing = sorted(
            n for n in mine if n.startswith("module/") and n not in saved | set(excluded)
        )
        if missing and options.strict:
            raise CheckpointError(
                f"it has no {some(missing)}; load the model that was saved, or with "
                "load_module_strict=False"
            )
        shapes = {n: states.shape(n) for n in sorted(saved & set(mine))}
        if wrong := [
            f"{n} has shape {s} there and {mine[n]} here" for n, s in shapes.items() if s != mine[n]
        ]:
            raise CheckpointError(f"{'; '.join(wrong[:5])}; load into the model that was saved")
        return sorted(n for n in saved if n.startswith("module/") and n not in mine)

    def restore(self, saved: SavedRun, options: LoadOptions) -> None:
        """Make this run what `saved` is, but for what `options` leaves as it is.

        Whoever calls it has checked everything that can be: an error may leave the run half loaded.
        Random states come last, so that nothing done here draws from them.
        """
        takes = options.optimizer and not options.module_only and saved.common["optimizer_groups"]
        optimizer = self.optimizer if takes else None
        if options.custom is not None:
            options.custom(_module_tensors(saved), self.module)
            # Without weights in the source, master weights are made from those that the function
            # has just set.
            weights = _Without(saved.states, ("module/", "master/"))
            self._owner.load_states(weights, optimizer, strict=False)
        else:
            strict = options.strict and not saved.partial
            self._owner.load_states(saved.states, optimizer, strict=strict)
            self._load_module_values(saved)
        if options.module_only:
            return
        if optimizer is not None:
            _set_optimizer_values(optimizer, saved.local["optimizer"])
            if isinstance(optimizer, HasOwnedStates):
                optimizer.load_owned_states(saved.states)
            if isinstance(optimizer, HasRankState):
                self._load_rank_state(optimizer, saved)
        self._load_common(
            saved.common, optimizer=optimizer is not None, scheduler=options.scheduler
        )
        self._engine.begin_anew()
        _load_plugins(self.ctx, saved.local["plugins"])
        random = saved.local["random"]
        layout = self._layout()
        if saved.own and random is not None and saved.local.get("layout", layout) == layout:
            rng.restore(random, self.ctx.accelerator)
        # another program's, another rank's, or of a rank with another place: along tp they must
        # stay equal
        else:
            log.debug(
                "rank %d is new: it keeps its random state and takes another's plugin states",
                self.rank,
            )

    def _load_rank_state(self, optimizer: HasRankState, saved: SavedRun) -> None:
        """What ranks kept for themselves, if each rank updates now what it did then; else none.

        Collective.
        """
        # Checkpoints of other programs, and of ds_core before it kept this, have none.
        kept = saved.local.get("optimizer_rank") or {}
        same = (
            self.ctx.world_size == saved.world_size
            and saved.local.get("optimizer_place") == self._place()
        )
        # If one rank alone started again, the others would treat its errors as known.
        said = comm.all_gather_json([same, bool(kept)])
        if all(rank[0] for rank in said):
            optimizer.load_rank_state_dict(kept)
        elif any(rank[1] for rank in said) and self.ctx.rank == 0:
            log.warning(
                "%s: what each rank kept for itself (what compression had lost) is left out, since "
                "ranks hold other "
                "parameters, or as other groups, than when it was saved; it starts again from zero",
                type(optimizer).__name__,
            )

    def _place(self) -> dict[str, Any]:
        """What a state of this rank's own belongs to: the mesh, and the parameters of each
        group."""
        return {"mesh": self.ctx.mesh.describe(), "params": self._optimizer_params()}

    def _layout(self) -> dict[str, int]:
        """The axes that say which part of the model a rank runs, with their sizes."""
        mesh = self.ctx.mesh
        data = ("dp", *mesh.alias.get("dp", ()))
        return {
            axis: size for axis, size in mesh.describe().items() if axis not in data and size > 1
        }

    def _load_common(self, state: Mapping[str, Any], *, optimizer: bool, scheduler: bool) -> None:
        """Put `state` back; raises CheckpointError, with nothing changed, when its optimizer groups
        do not fit.
        """
        engine = self._engine
        groups = self._engine.param_groups()
        saved = state["optimizer_groups"]
        if optimizer and groups and len(saved) != len(groups):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} optimizer groups, this run {len(groups)}; "
                "use the same groups, or load_optimizer_states=False"
            )
        for counter in COUNTERS:
            setattr(engine, counter, int(state[counter]))
        if optimizer:
            if engine.scaler is not None and state["scaler"] is not None:
                _restore(engine.scaler, state["scaler"], "the state of the loss scaler")
            for group, values in zip(groups, saved, strict=False):
                group.update(values)
        if scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if engine.training_dataloader is not None and state["data"] is not None:
            _restore(engine.training_dataloader, state["data"], "the data position")

    def _load_module_values(self, saved: SavedRun) -> None:
        """Buffers of this rank's own, and what modules keep by themselves."""
        if saved.own:
            here = persistent_buffers(self.module)
            for name, tensor in saved.local.get("buffers", {}).items():
                if name in here:
                    here[name].data.copy_(tensor)
        modules = self.extra_modules()
        for name, state in saved.local["module_extra"].items():
            if name in modules:
                modules[name].set_extra_state(state)


def some(names: Sequence[str]) -> str:
    """The first few names of module states, for an error message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(n.removeprefix("module/") for n in names[:5]) + more


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers, by name, that are part of the module's state dict."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


class _Without:
    """A `StateSource` in which states whose names begin with one of `prefixes` are left out."""

    def __init__(self, source: StateSource, prefixes: tuple[str, ...]) -> None:
        self._source = source
        self._prefixes = prefixes
        self.shape: Callable[..., tuple[int, ...]] = source.shape
        self.read: Callable[..., Tensor] = source.read

    def names(self) -> Sequence[str]:
        """See `StateSource`."""
        return [n for n in self._source.names() if not n.startswith(self._prefixes)]


def _module_tensors(saved: SavedRun) -> dict[str, Tensor]:
    """The unsharded tensors of the saved module, under all their names."""
    names = [n for n in saved.states.names() if n.startswith("module/")]
    tensors = {
        n.removeprefix("module/"): saved.states.read(n).view(saved.states.shape(n)) for n in names
    }
    return tensors | {
        alias: tensors[name] for alias, name in saved.shared.items() if name in tensors
    }


def _plugin_objects(ctx: Context) -> dict[str, Any]:
    """What plugins want kept: ``plugins/<plugin>/<name>`` -> an object with state_dict and
    load_state_dict.
    """
    found: dict[str, Any] = {}
    for answer in ctx.plugins.ask("ds_checkpointables", ctx=ctx):
        for name, item in answer.value.items():
            key = f"plugins/{answer.plugin.name}/{name}"
            if key in found:
                raise CheckpointError(
                    f"two plugins keep a state under {key!r}: {answer.plugin} is the second"
                )
            found[key] = item
    return found


def _load_plugins(ctx: Context, saved: Mapping[str, Any]) -> None:
    objects = _plugin_objects(ctx)
    for name, item in objects.items():
        if name in saved:
            item.load_state_dict(saved[name])
        else:
            log.warning("the checkpoint has no state for %s, which starts as it is", name)
    for name in sorted(set(saved) - set(objects)):
        log.warning(
            "the checkpoint has a state for %s, which this run does not have; it is left out", name
        )


def _optimizer_values(optimizer: Optimizer | None) -> dict[str, dict[str, Any]]:
    """State that is not in tensors (a step counted as an int, say): "<group>.<position>" -> key ->
    value.
    """
    found: dict[str, dict[str, Any]] = {}
    for place, param in _positions(optimizer):
        state = optimizer.state.get(param, {}) if optimizer is not None else {}
        if values := {k: v for k, v in state.items() if not isinstance(v, Tensor)}:
            found[place] = values
    return found


def _set_optimizer_values(optimizer: Optimizer, values: Mapping[str, Mapping[str, Any]]) -> None:
    for place, param in _positions(optimizer):
        if place in values:
            optimizer.state[param].update(values[place])


def _positions(optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for g, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for p, param in enumerate(group["params"]):
            yield f"{g}.{p}", param


def _restore(target: Any, state: Any, what: str) -> None:
    """Load a state into a loader or scaler, which a plugin may have made; CheckpointError when it
    does not fit.
    """
    try:
        target.load_state_dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} in the checkpoint, {state}, does not fit {type(target).__name__} of this run: "
            f"{type(error).__name__}: {error}; resume with the config that it was saved with"
        ) from error
