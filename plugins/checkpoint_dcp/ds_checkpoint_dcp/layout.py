"""What the names in a checkpoint of torch.distributed.checkpoint mean: weights, optimizer states,
and the rest.

Programs choose the names. These are recognised:

====================================== ====================================================
``model``, ``optim`` (any words)       `torch.distributed.checkpoint.state_dict.get_state_dict`:
                                       ``optim.state.<weight>.<key>``, ``optim.param_groups.<n>.<key>``
the same with flattened optimizers     ``optimizer.state.<weight>.<key>``,
                                       ``optimizer.param_groups.<weight>.<key>``
weights at the top, as torchtitan      ``<weight>``, ``optimizer.``, ``lr_scheduler.``,
                                       ``train_state.``
weights alone                          ``<weight>``
====================================== ====================================================

torchtitan: torchtitan/components/checkpointer/dcp.py and base.py, which put the model's state dict
at the top of what is saved and flatten the optimizers'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_checkpoint.formats.foreign import GROUP_KEYS

from ds_checkpoint_dcp.metadata import KeyPath

_MODELS = ("model", "module", "state_dict", "model_state_dict", "network", "net")
_STEPS = ("step", "global_step", "global_steps", "iteration")
_PROGRESS = ("train_state", "trainer", "progress", "train_progress", "state")
_SCHEDULES = ("lr_scheduler", "lr_schedulers", "scheduler", "lr_sched")
OURS = "dscore"
"""What this package adds to what it writes: what only ds_core reads."""


@dataclass(slots=True)
class Layout:
    """Which name means what."""

    # Weight -> its name in the checkpoint.
    weights: dict[str, str] = field(default_factory=dict)
    # (key, weight) -> name, of the optimizer's states.
    states: dict[tuple[str, str], str] = field(default_factory=dict)
    # (group, key) -> name, where groups are numbered.
    groups: dict[tuple[int, str], str] = field(default_factory=dict)
    # The name of all groups in one value, as torch before 2.4 kept them.
    all_groups: str | None = None
    # (weight, key) -> name, where each weight has its hyperparameters.
    by_weight: dict[tuple[str, str], str] = field(default_factory=dict)
    # Names that may hold the number of steps, the most likely first.
    steps: list[str] = field(default_factory=list)
    # Keys that lead to a value in the schedule's state -> name.
    schedule: dict[KeyPath, str] = field(default_factory=dict)
    # What this package wrote, by word.
    ours: dict[str, str] = field(default_factory=dict)
    # The first key of what was not recognised.
    others: list[str] = field(default_factory=list)


def read_layout(paths: Mapping[str, KeyPath], tensors: Iterable[str]) -> Layout:
    """The meaning of each name; paths: of every name, tensors: the names of tensors."""
    layout = Layout()
    is_tensor = set(tensors)
    rest = dict(paths)
    for name, path in paths.items():
        if path[0] == OURS and len(path) == 2:
            layout.ours[str(path[1])] = name
            del rest[name]
    _take_optimizer(layout, rest)
    _take_weights(layout, rest, is_tensor)
    others: Counter[str] = Counter()
    for name, path in rest.items():
        if path[0] in _SCHEDULES or (len(path) > 1 and path[1] in _SCHEDULES):
            start = 1 if path[0] in _SCHEDULES else 2
            layout.schedule[path[start:]] = name
        elif path[-1] in _STEPS and (len(path) == 1 or path[-2] in _PROGRESS):
            layout.steps.append(name)
        else:
            others[str(path[0])] += 1
    layout.others.extend(sorted(others))
    return layout


def _take_optimizer(layout: Layout, rest: dict[str, KeyPath]) -> None:
    """The optimizer's states and groups, nested or flattened; they go from `rest`."""
    nested = {p[: p.index("param_groups")] for p in rest.values() if "param_groups" in p}
    flat = {p[:-1] for p in rest.values() if str(p[-1]).startswith("param_groups.") and len(p) > 1}
    for name, path in list(rest.items()):
        if path[:-3] in nested and path[-3] == "state":
            layout.states[str(path[-1]), str(path[-2])] = name
        elif path[:-3] in nested and path[-3] == "param_groups" and isinstance(path[-2], int):
            layout.groups[path[-2], str(path[-1])] = name
        elif path[-1] == "param_groups" and path[:-1] in nested:
            layout.all_groups = name
        elif path[:-1] in flat:
            kind, _, inner = str(path[-1]).partition(".")
            weight, _, key = inner.rpartition(".")
            if kind == "state":
                layout.states[key, weight] = name
            elif kind == "param_groups":
                layout.by_weight[weight, key] = name
        else:
            continue
        del rest[name]


def _take_weights(layout: Layout, rest: dict[str, KeyPath], is_tensor: set[str]) -> None:
    """The model's tensors: those at the place where the optimizer's weights are, or else at the one
    that has a model's name, or else at the top.
    """
    by_root: dict[KeyPath, dict[str, str]] = {}
    for name, path in rest.items():
        if name in is_tensor and not (len(path) == 1 and path[0] in _STEPS):
            by_root.setdefault(path[:-1], {})[str(path[-1])] = name
    trained = {weight for _, weight in layout.states}
    if not by_root:
        return

    def likelihood(root: KeyPath) -> tuple[Any, ...]:
        named = bool(root) and root[-1] in _MODELS
        return (len(trained & set(by_root[root])), named, not root, len(by_root[root]))

    root = max(by_root, key=likelihood)
    layout.weights.update(by_root[root])
    for name in by_root[root].values():
        del rest[name]
    # A model's values that are no tensors (extra states) are at the same place.
    for name, path in list(rest.items()):
        if path[:-1] == root and root:
            layout.others.append(name)
            del rest[name]


def groups_of(
    layout: Layout, value: Any
) -> tuple[list[dict[str, Any]], list[list[str]], dict[str, Any]]:
    """(each group's hyperparameters, the weights of each, all values by name); `value` reads one."""
    if layout.all_groups is not None:
        found = value(layout.all_groups)
        rows = [r for r in found if isinstance(r, dict)] if isinstance(found, list) else []
        kept = [{k: row[k] for k in GROUP_KEYS if k in row} for row in rows]
        lists = [row.get("params") for row in rows]
        names = [list(map(str, n)) if isinstance(n, list) else [] for n in lists]
        return kept, names, {f"{layout.all_groups}.{k}": v for g in kept for k, v in g.items()}
    values = {name: value(name) for name in (*layout.groups.values(), *layout.by_weight.values())}
    if layout.groups:
        # As many as there are names for, whatever numbers they bear.
        numbers = sorted({number for number, _ in layout.groups})
        count = len(numbers)
        groups: list[dict[str, Any]] = [{} for _ in range(count)]
        params: list[list[str]] = [[] for _ in range(count)]
        for (number, key), name in layout.groups.items():
            if key == "params" and isinstance(values[name], list):
                params[numbers.index(number)] = [str(weight) for weight in values[name]]
            elif key in GROUP_KEYS:
                groups[numbers.index(number)][key] = values[name]
        return groups, params, values
    per_weight: dict[str, dict[str, Any]] = {}
    for (weight, key), name in layout.by_weight.items():
        row = per_weight.setdefault(weight, {})
        if key in GROUP_KEYS:
            row[key] = values[name]
    return *_grouped(per_weight), values


def _grouped(
    per_weight: Mapping[str, Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Weights of equal hyperparameters were a group, as far as can be told."""
    groups: list[dict[str, Any]] = []
    params: list[list[str]] = []
    for weight, found in per_weight.items():
        row = dict(found)
        if row not in groups:
            groups.append(row)
            params.append([])
        params[groups.index(row)].append(weight)
    return groups, params


def nested(values: Mapping[KeyPath, Any]) -> Any:
    """A state dict, of values by the keys that lead to them."""
    if set(values) == {()}:
        return values[()]
    found: dict[Any, Any] = {}
    for path, value in values.items():
        place = found
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return _lists(found)


def _lists(value: Any) -> Any:
    """Dicts whose keys count from 0 on were lists."""
    if not isinstance(value, dict):
        return value
    found = {key: _lists(item) for key, item in value.items()}
    if found and sorted(map(str, found)) == sorted(map(str, range(len(found)))):
        if all(isinstance(key, int) for key in found):
            return [found[n] for n in range(len(found))]
    return found


def unread(names: Sequence[str]) -> str:
    """What is said of `Layout.others`."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"not taken over: {', '.join(names[:6])}{more}"
