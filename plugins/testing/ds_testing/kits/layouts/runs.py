"""Training `CutModel` under a layout, on each rank, and in one process."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TOTAL = 4
"""Micro-batches of a step, over all ranks: every layout sees the same."""
CLIP = 0.5
Wanted = tuple[str, dict[str, Any]]
"""The name of an optimizer, and its parameters."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model lie.

    axes: of the kit's own plugin, tp, ep and pp.
    config: its sections, such as a ZeRO stage.
    """

    world: int
    axes: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cut(self) -> bool:
        """Whether ranks have parts of parameters, or some of them."""
        return bool(self.axes)

    @property
    def zero(self) -> bool:
        """Whether it is one of ZeRO's."""
        return "zero_optimization" in self.config

    @property
    def on_disk(self) -> bool:
        """Whether states are on a disk between updates."""
        zero = self.config.get("zero_optimization", {})
        return bool(zero.get("offload_optimizer", {}).get("device") == "nvme")


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    # Small buckets, so that a tensor lies in several.
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 150, **more}}


_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# The folder of a run is its own, and goes with it.
_DISK = {"offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()}}
LAYOUTS: Mapping[str, Layout] = {
    "alone": Layout(1),
    "dp 2": Layout(2),
    "zero 1": Layout(2, {}, _zero(1)),
    "zero 2": Layout(2, {}, _zero(2)),
    "zero 3": Layout(2, {}, _zero(3)),
    "offload": Layout(2, {}, _zero(2, **_OFFLOAD)),
    "disk": Layout(2, {}, _zero(3, **_DISK)),
    "tp": Layout(2, {"tp": 2}),
    "ep": Layout(2, {"ep": 2}),
    "pp": Layout(2, {"pp": 2}),
    "dp 4": Layout(4),
    "zero 3, 4 ranks": Layout(4, {}, _zero(3)),
    "tp, zero 1": Layout(4, {"tp": 2}, _zero(1)),
    "tp, zero 3": Layout(4, {"tp": 2}, _zero(3)),
    "ep, zero 2": Layout(4, {"ep": 2}, _zero(2)),
    "ep, offload": Layout(4, {"ep": 2}, _zero(1, **_OFFLOAD)),
    "tp, disk": Layout(4, {"tp": 2}, _zero(2, **_DISK)),
    "pp, disk": Layout(4, {"pp": 2}, _zero(1, **_DISK)),
    "pp, zero 1": Layout(4, {"pp": 2}, _zero(1)),
    "pp, tp": Layout(4, {"pp": 2, "tp": 2}),
}
ROUTES: Sequence[tuple[str, str]] = (
    ("tp, zero 1", "zero 3"),
    ("ep", "offload"),
    ("pp", "tp"),
    ("zero 2", "ep, zero 2"),
    ("tp, disk", "zero 3"),
    ("zero 1", "disk"),
)
"""A checkpoint of the one is resumed in the other."""


def installed(layout: Layout) -> bool:
    """Whether what its sections ask for is there."""
    wanted = ["ds_zero"] * layout.zero + ["ds_nvme"] * layout.on_disk
    return all(importlib.util.find_spec(name) is not None for name in wanted)


def start(
    layout: Layout,
    wanted: Wanted,
    dtype: str,
    load: Sequence[str],
    kit: Any,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """The engine of a layout.

    kit: reference of the class, whose ``prepare`` is called with the parameters.
    more: other keys of the config, merged with those of the layout.
    """
    import torch

    import ds_core
    from ds_testing.kits.layouts.model import CutModel
    from ds_testing.kits.layouts.plugin import LOAD
    from ds_testing.worker import find_function

    model = CutModel().to(getattr(torch, dtype))
    name, params = wanted
    find_function(kit)().prepare(name, list(model.parameters()))
    axes = layout.axes
    data = layout.world // (axes.get("tp", 1) * axes.get("pp", 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": TOTAL // data,
        "gradient_clipping": CLIP,
        "optimizer": {"type": name, "params": params},
        "plugins": {"load": [LOAD, *load]},
        "cut_axes": {"axes": dict(axes)},
        **layout.config,
    }
    engine, *_ = ds_core.initialize(model=model, config=merged(config, more or {}))
    return engine


def merged(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the keys of `more`, section by section; it shares no section with either."""
    found = {k: merged({}, v) if isinstance(v, Mapping) else v for k, v in config.items()}
    for key, value in more.items():
        if isinstance(value, Mapping):
            own = found.get(key)
            found[key] = merged(own if isinstance(own, Mapping) else {}, value)
        else:
            found[key] = value
    return found


def go(engine: Any, steps: Iterable[int]) -> None:
    """Train these steps."""
    mesh = engine.ctx.mesh
    count = TOTAL // mesh.size("dp")
    along = mesh.ranks("ep") if mesh.has("ep") else [mesh.rank]
    places = [mesh.ranks("dp").index(rank) for rank in along]
    for step in steps:
        for micro in range(count):
            others = [place * count + micro for place in places]
            loss = engine(step, mesh.index("dp") * count + micro, others)
            engine.backward(loss)
            engine.step()


def ended(engine: Any) -> dict[str, Tensor]:
    """The full weights of the parameters that this rank has parts of."""
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    engine.destroy()
    return found


def train_alone(
    make: Callable[[Any], Any], dtype: str, steps: int, nudge: float = 0.0
) -> dict[str, Tensor]:
    """The weights after so many steps of one process.

    make: gives the optimizer of named parameters.
    nudge: the share by which gradients are changed, as rounding would.
    """
    import torch

    from ds_testing.kits.layouts.model import CutModel

    model = CutModel().to(getattr(torch, dtype))
    params = dict(model.named_parameters())
    optimizer = make(params)
    noise = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        for place in range(TOTAL):
            (model(step, place, [place]) / TOTAL).backward()
        torch.nn.utils.clip_grad_norm_(list(params.values()), CLIP)
        for param in params.values():
            assert param.grad is not None
            param.grad *= 1 + nudge * torch.randn(param.shape, generator=noise).to(param)
        optimizer.step()
    return {name: param.detach().double() for name, param in params.items()}


# -- on the ranks ----------------------------------------------------------------------------------


def train_all(
    kit: Any, wanted: list[Wanted], layouts: list[str], dtype: str, load: list[str], steps: int
) -> list[list[Any]]:
    """For each optimizer and each layout the weights, or why it was refused."""

    def run(name: str, params: dict[str, Any], layout: str) -> Any:
        engine = start(LAYOUTS[layout], (name, params), dtype, load, kit)
        go(engine, range(steps))
        return ended(engine)

    return [[_or_why(run, *each, layout) for layout in layouts] for each in wanted]


def save_all(
    kit: Any, wanted: list[Wanted], layout: str, load: list[str], folder: str, steps: int
) -> list[Any]:
    """Some steps of each optimizer and a checkpoint; why it was refused, or None."""

    def run(name: str, params: dict[str, Any]) -> None:
        engine = start(LAYOUTS[layout], (name, params), "float64", load, kit)
        go(engine, range(steps))
        engine.save_checkpoint(folder, tag=name)
        engine.destroy()

    return [_or_why(run, *each) for each in wanted]


def resume_all(
    kit: Any, wanted: list[Wanted], layout: str, load: list[str], folder: str, steps: list[int]
) -> list[Any]:
    """Some steps of each optimizer after its checkpoint: the weights, or why it was refused."""

    def run(name: str, params: dict[str, Any]) -> Any:
        engine = start(LAYOUTS[layout], (name, params), "float64", load, kit)
        engine.load_checkpoint(folder, tag=name)
        go(engine, steps)
        return ended(engine)

    return [_or_why(run, *each) for each in wanted]


def train_values(
    kit: Any,
    values: list[dict[str, Any]],
    wanted: Wanted,
    layouts: list[str],
    load: list[str],
    steps: int,
) -> list[list[Any]]:
    """For each value of a plugin and each layout the weights, or why it was refused."""

    def run(more: dict[str, Any], layout: str) -> Any:
        engine = start(LAYOUTS[layout], wanted, "float64", load, kit, more)
        go(engine, range(steps))
        return ended(engine)

    return [[_or_why(run, more, layout) for layout in layouts] for more in values]


def _or_why(run: Callable[..., Any], *arguments: Any) -> Any:
    from ds_core.errors import DSError

    try:
        return run(*arguments)
    except DSError as error:
        return str(error)
