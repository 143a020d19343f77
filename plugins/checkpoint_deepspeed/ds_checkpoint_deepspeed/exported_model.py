"""A checkpoint's whole states under DeepSpeed's names, in the order in which its optimizers have
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ds_checkpoint.offline import Saved
from torch import Tensor

from ds_checkpoint_deepspeed.opened import run_values
from ds_checkpoint_deepspeed.reading.names import their_expert, their_name
from ds_checkpoint_deepspeed.reading.zero import expert_place
from ds_core.errors import CheckpointError

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Model:
    """Whole states under DeepSpeed's names. order: trained parameters by optimizer group.

    place: DeepSpeed's name -> (the state's name here, the row of stacked experts; None: all of it).
    """

    saved: Saved
    run: dict[str, Any]
    client: dict[str, Any]
    place: dict[str, tuple[str, int | None]]
    order: list[list[str]]
    groups: list[dict[str, Any]]
    moments: list[str]
    frozen: list[str]
    buffers: list[str]
    shared: dict[str, str]

    @property
    def experts(self) -> list[list[list[str]]]:
        """The weights of each expert of each MoE layer, in the optimizer's order of layers."""
        layers: dict[str, dict[int, list[str]]] = {}
        for name in [*self.trained, *(n for n in self.place if n not in set(self.trained))]:
            if (found := expert_place(name)) is not None:
                layers.setdefault(found[0], {}).setdefault(found[1], []).append(name)
        return [[experts[row] for row in sorted(experts)] for experts in layers.values()]

    @property
    def trained(self) -> list[str]:
        """In the optimizer's order."""
        return [n for names in self.order for n in names]

    @property
    def low(self) -> torch.dtype | None:
        """Of the weights of a 16-bit run."""
        kinds = {self.saved.source.dtype(f"module/{self.place[n][0]}") for n in self.trained}
        return {"BF16": torch.bfloat16, "F16": torch.float16}.get(
            kinds.pop() if len(kinds) == 1 else ""
        )

    def _state(self, kind: str, name: str) -> Tensor:
        state, row = self.place[name]
        found = self.saved.source.whole(f"{kind}/{state}")
        return found if row is None else found[row].clone()

    def shape(self, name: str) -> torch.Size:
        """Of a parameter."""
        state, row = self.place[name]
        whole = self.saved.source.shape(f"module/{state}")
        return torch.Size(whole if row is None else whole[1:])

    def weight(self, name: str) -> Tensor:
        """As the model has it."""
        return self._state("module", name)

    def fp32(self, name: str) -> Tensor:
        """As exact as it was saved."""
        exact = f"master/{self.place[name][0]}" in self.saved.source
        return self._state("master" if exact else "module", name).float()

    def moment(self, key: str, name: str) -> Tensor:
        """A state of the optimizer; zeros where it has not begun."""
        if f"optimizer/{key}/{self.place[name][0]}" in self.saved.source:
            return self._state(f"optimizer/{key}", name)
        return torch.zeros(self.shape(name))

    def step(self, name: str) -> Tensor | None:
        """The optimizer's counter of a parameter."""
        state = f"optimizer/step/{self.place[name][0]}"
        return self.saved.source.whole(state).reshape(()) if state in self.saved.source else None

    def module(self) -> dict[str, Tensor]:
        """All weights and buffers, under all names."""
        found = {name: self.weight(name) for name in self.place}
        return found | {a: found[n] for a, n in self.shared.items() if n in found}


def read_model(saved: Saved) -> Model:
    """What is to be written of a checkpoint; CheckpointError for weights that differ along mesh
    axes.
    """
    if saved.split:
        raise CheckpointError(
            f"{saved.path}: {', '.join(saved.split[:3])} differ along mesh axes; DeepSpeed has no "
            "form"
        )
    run, client = run_values(saved)
    ours = saved.weights()
    stacked = {n: expert for n in ours if (expert := their_expert(n)) is not None}
    moe = {n.partition("experts.stacked.")[0] for n in stacked}
    pipeline = any(n.startswith("layers.") for n in ours) and all(
        n.startswith(("layers.", "tied.")) for n in ours
    )

    def theirs(name: str) -> Iterator[tuple[str, int | None]]:
        if name in stacked:
            before, after = stacked[name]
            rows = saved.source.shape(f"module/{name}")[0]
            yield from ((f"{before}{row}{after}", row) for row in range(rows))
        else:
            yield their_name(name, moe, pipeline=pipeline), None

    place = {other: (name, row) for name in ours for other, row in theirs(name)}
    states = [
        s.partition("/")[2].partition("/")
        for s in saved.source.names()
        if s.startswith("optimizer/")
    ]
    # A parameter was trained if the optimizer has states of it, or if it is named in its groups.
    named = [[n for n in names if n in ours] for names in run.get("optimizer_params") or []]
    trained = {name for _, _, name in states} | {n for names in named for n in names}
    # weights alone: which are buffers is not known
    if not trained and saved.manifest.optimizer is None:
        frozen_here = set(saved.manifest.frozen)
        trained = {n for n in ours if saved.source.dtype(f"module/{n}") in _FLOATS} - frozen_here
    rest = [n for n in ours if n in trained and n not in {n for names in named for n in names}]
    named = named or [[]]
    named[0] += rest
    order = [_experts_together([o for n in names for o, _ in theirs(n)]) for names in named]
    masters = {n.removeprefix("master/") for n in saved.source.names() if n.startswith("master/")}
    frozen = [
        o for n in ours if n in saved.manifest.frozen and n not in trained for o, _ in theirs(n)
    ]
    buffers = [
        o
        for n in ours
        if n not in trained | masters | set(saved.manifest.frozen)
        for o, _ in theirs(n)
    ]
    moments = list(dict.fromkeys(key for key, _, _ in states if key != "step"))
    shared = {
        their_name(a, moe, pipeline=pipeline): their_name(n, moe, pipeline=pipeline)
        for a, n in saved.manifest.shared.items()
    }
    groups = [{"bias_correction": True, **g} for g in run["optimizer_groups"]] or [{"lr": 0.0}]
    if len(groups) != len(order):
        order = [[n for names in order for n in names], *([] for _ in groups[1:])]
    for group, names in zip(groups, order, strict=True):
        if names and all(expert_place(n) is not None for n in names):
            group |= {"moe": True, "name": "ep_size_1"}
    return Model(saved, run, client, place, order, groups, moments, frozen, buffers, shared)


def _experts_together(names: list[str]) -> list[str]:
    """One expert after the other, as modules have them, where weights of all experts come one after
    the other.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        if (place := expert_place(name)) is not None:
            layers.setdefault(place[0], []).append(name)
    found: list[str] = []
    for name in names:
        place = expert_place(name)
        if place is None:
            found.append(name)
        else:
            found += sorted(layers.pop(place[0], []), key=lambda n: (expert_place(n) or place)[1])
    return found
