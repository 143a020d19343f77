"""A checkpoint's whole states under DeepSpeed's names, in the order in which its optimizers have
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ds_checkpoint.folder.tensorfile import DTYPES
from ds_checkpoint.formats.ours import run_values
from ds_checkpoint.offline import Saved
from torch import Tensor

from ds_checkpoint_deepspeed.reading.names import their_expert, their_name
from ds_checkpoint_deepspeed.reading.zero import expert_place
from ds_checkpoint_deepspeed.saving import Later
from ds_core.errors import CheckpointError

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Model:
    """Full states under DeepSpeed's names."""

    saved: Saved
    # The run's values and the program's.
    run: dict[str, Any]
    client: dict[str, Any]
    # DeepSpeed's name -> (the state's name here, the row of stacked experts; None: all of it).
    place: dict[str, tuple[str, int | None]]
    # Names of trained parameters, by optimizer group, and the groups' hyperparameters.
    order: list[list[str]]
    groups: list[dict[str, Any]]
    # Keys of the optimizer's states, without its counter.
    moments: list[str]
    # Names of parameters that are not trained, and of buffers.
    frozen: list[str]
    buffers: list[str]
    # Further name -> first name, of tensors that modules share.
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

    def module_later(self) -> dict[str, Later]:
        """The same as `module`, read when they are written."""
        found = {name: self._later(name) for name in self.place}
        return found | {a: found[n] for a, n in self.shared.items() if n in found}

    def _later(self, name: str) -> Later:
        dtype = DTYPES[self.saved.source.dtype(f"module/{self.place[name][0]}")]
        return Later(self.shape(name), dtype, lambda: self.weight(name))

    def module(self) -> dict[str, Tensor]:
        """All weights and buffers, under all names."""
        found = {name: self.weight(name) for name in self.place}
        return found | {a: found[n] for a, n in self.shared.items() if n in found}


class _Names:
    """DeepSpeed's names for a checkpoint's weights and buffers."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        # Names here, in the manifest's order.
        self.ours = saved.weights()
        # Stacked experts -> DeepSpeed's name before and after the expert's number.
        self._stacked = {n: expert for n in self.ours if (expert := their_expert(n)) is not None}
        self._moe = {n.partition("experts.stacked.")[0] for n in self._stacked}
        # A pipeline's layers bear numbers, and DeepSpeed counts them as we do.
        self._pipeline = any(n.startswith("layers.") for n in self.ours) and all(
            n.startswith(("layers.", "tied.")) for n in self.ours
        )

    def of(self, name: str) -> str:
        """Of a tensor that is no stack of experts."""
        return their_name(name, self._moe, pipeline=self._pipeline)

    def rows(self, name: str) -> Iterator[tuple[str, int | None]]:
        """(DeepSpeed's name, the row of a stack of experts; None: all of the tensor)."""
        if name in self._stacked:
            before, after = self._stacked[name]
            rows = self._saved.source.shape(f"module/{name}")[0]
            yield from ((f"{before}{row}{after}", row) for row in range(rows))
        else:
            yield self.of(name), None

    def all(self, names: Iterable[str]) -> list[str]:
        """Of several tensors, with a name for each expert."""
        return [other for name in names for other, _ in self.rows(name)]


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
    names = _Names(saved)
    # (key, name) of each state of the optimizer.
    states = [
        (key, name)
        for key, _, name in (
            s.partition("/")[2].partition("/")
            for s in saved.source.names()
            if s.startswith("optimizer/")
        )
    ]
    by_group, trained = _trained(saved, names.ours, run, states)
    # What is neither trained nor known to be frozen, and has no fp32 master, is a buffer.
    masters = {n.removeprefix("master/") for n in saved.source.names() if n.startswith("master/")}
    weights = trained | masters | set(saved.manifest.frozen)
    order = [_experts_together(names.all(group)) for group in by_group]
    groups, order = _groups(run, order)
    return Model(
        saved,
        run,
        client,
        place={other: (name, row) for name in names.ours for other, row in names.rows(name)},
        order=order,
        groups=groups,
        moments=list(dict.fromkeys(key for key, _ in states if key != "step")),
        frozen=names.all(n for n in names.ours if n in saved.manifest.frozen and n not in trained),
        buffers=names.all(n for n in names.ours if n not in weights),
        shared={names.of(a): names.of(n) for a, n in saved.manifest.shared.items()},
    )


def _trained(
    saved: Saved, ours: list[str], run: dict[str, Any], states: list[tuple[str, str]]
) -> tuple[list[list[str]], set[str]]:
    """(names of trained parameters by optimizer group, all of them); names are those here."""
    # A parameter was trained if the optimizer has states of it, or if it is named in its groups.
    named = [[n for n in names if n in ours] for names in run.get("optimizer_params") or []]
    in_groups = {n for names in named for n in names}
    trained = {name for _, name in states} | in_groups
    # A checkpoint without an optimizer does not say which tensors are buffers: all floats count.
    if not trained and saved.manifest.optimizer is None:
        frozen = set(saved.manifest.frozen)
        trained = {n for n in ours if saved.source.dtype(f"module/{n}") in _FLOATS} - frozen
    # Without names in the groups, all belong to the first.
    named = named or [[]]
    named[0] += [n for n in ours if n in trained and n not in in_groups]
    return named, trained


def _groups(
    run: dict[str, Any], order: list[list[str]]
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """The optimizer's groups as DeepSpeed has them, and the parameters' order, one list a group."""
    groups = [{"bias_correction": True, **g} for g in run["optimizer_groups"]] or [{"lr": 0.0}]
    if len(groups) != len(order):
        order = [[n for names in order for n in names], *([] for _ in groups[1:])]
    # DeepSpeed's optimizer reduces the gradients of groups with this mark among experts only.
    for group, names in zip(groups, order, strict=True):
        if names and all(expert_place(n) is not None for n in names):
            group |= {"moe": True, "name": "ep_size_1"}
    return groups, order


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
