"""What every hook is given: the config, the mesh and the parts that were chosen for this run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ds_core.undo import Undo

if TYPE_CHECKING:
    from torch import nn

    from ds_core.accelerator import Accelerator
    from ds_core.config import RunConfig
    from ds_core.config.core import Batch
    from ds_core.engine import RunningEngine
    from ds_core.entries import Grain
    from ds_core.kernels import Kernels
    from ds_core.mesh import Mesh
    from ds_core.partition import ParamInfo
    from ds_core.plugins import Plugins
    from ds_core.precision import Precision

T = TypeVar("T")


class StashKey(Generic[T]):
    """An identity for one slot of a `Stash`; `name` is only for error messages."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"StashKey({self.name!r})"


class Stash:
    """A mapping whose values have the type that their key declares."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[StashKey[Any], Any] = {}

    def __setitem__(self, key: StashKey[T], value: T) -> None:
        self._slots[key] = value

    def __getitem__(self, key: StashKey[T]) -> T:
        try:
            value: T = self._slots[key]
        except KeyError:
            raise KeyError(
                f"nothing was stashed under {key!r}; its plugin has not run yet"
            ) from None
        return value

    def get(self, key: StashKey[T], default: T | None = None) -> T | None:
        """The value, or `default` when nothing was stashed under `key`."""
        return self._slots.get(key, default)

    def __contains__(self, key: StashKey[Any]) -> bool:
        return key in self._slots


@dataclass(slots=True)
class Context:
    """One run, as plugins see it. Filled from top to bottom while the engine is built."""

    # -- what the run was started with
    config: RunConfig
    plugins: Plugins
    mesh: Mesh
    accelerator: Accelerator
    kernels: Kernels
    precision: Precision
    batch: Batch
    """The resolved batch sizes; they may change between two windows."""

    # -- what was given to `initialize`
    grain: Grain | None = None
    """What the optimizer's arithmetic needs whole (see `OptimizerEntry`); None when it is an object
    or function of the user's that no plugin has declared."""
    own_optimizer: bool = False
    """Whether the optimizer was given to `initialize` and is of no installed package."""
    collate_fn: Callable[[list[Any]], Any] | None = None

    # -- the model
    module: nn.Module | None = None
    """The transformed model; None before the transforms have run."""
    params: dict[nn.Parameter, ParamInfo] = field(default_factory=dict)
    """The name and axes of each parameter of `module`; empty before."""
    trained: list[nn.Parameter] = field(default_factory=list)
    """The parameters that the optimizer was given, frozen ones too."""
    buffers: dict[str, ParamInfo] = field(default_factory=dict)
    """As `params`, of buffers, by name."""

    # -- for plugins
    stash: Stash = field(default_factory=Stash)
    """Typed state of plugins."""
    undo: Undo = field(default_factory=Undo)
    """Takes steps that give the model back as it was (`ds_core.undo`)."""
    # Weak, since the engine has this context: a cycle would keep both until a collection.
    engine_ref: Callable[[], RunningEngine | None] = lambda: None

    @property
    def engine(self) -> RunningEngine:
        """The engine, once it is built: for observers and other functions that are called while it
        trains.
        """
        engine = self.engine_ref()
        assert engine is not None, "the engine is not built yet, or gone"
        return engine

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.mesh.world_size
