"""Is a module what it was, after the engine that had it was destroyed? For the kits of
transforms."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ds_run_state.slices import Slice
    from torch import Tensor


class Structure:
    """A module as it is: the classes, attributes, hooks and parameters of all that is in it, but no
    values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            name: (module, type(module), _attributes(module))
            for name, module in model.named_modules()
        }
        self._params = {
            name: (
                param,
                tuple(param.shape),
                param.requires_grad,
                _attributes(param),
                dict(param._backward_hooks or {}),
                dict(param._post_accumulate_grad_hooks or {}),
            )
            for name, param in model.named_parameters()
        }

    def differences(self, model: nn.Module) -> list[str]:
        """What of `model` is not as it was."""
        now = Structure(model)
        found = [f"module {n!r} came or went" for n in self._modules.keys() ^ now._modules.keys()]
        found += [f"parameter {n!r} came or went" for n in self._params.keys() ^ now._params.keys()]
        for name, (module, kind, attributes) in self._modules.items():
            other, other_kind, others = now._modules.get(name, (module, kind, attributes))
            if other is not module or other_kind is not kind:
                found.append(
                    f"module {name!r} is a {other_kind.__name__}, and was another object or a "
                    f"{kind.__name__}"
                )
            found += [f"{name or 'model'}.{what}" for what in _changed(attributes, others)]
        for name, before in self._params.items():
            after = now._params.get(name, before)
            if after[1:3] != before[1:3]:
                found.append(
                    f"parameter {name!r} has (shape, trained) {after[1:3]}, not {before[1:3]}"
                )
            found += [f"parameter {name!r}, {what}" for what in _changed(before[3], after[3])]
            found += [f"parameter {name!r}, hook {what}" for what in _changed(before[4], after[4])]
            found += [
                f"parameter {name!r}, hook after accumulation {what}"
                for what in _changed(before[5], after[5])
            ]
        return found


def _attributes(thing: Any) -> dict[str, Any]:
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in vars(thing).items()
    }


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[str]:
    for key in sorted(map(str, before.keys() ^ after.keys())):
        yield f"{key} {'went' if key in map(str, before) else 'came'}"
    for key in before.keys() & after.keys():
        if isinstance(before[key], dict) and isinstance(after[key], dict):
            yield from (f"{key}: {what}" for what in _changed(before[key], after[key]))
        elif before[key] is not after[key] and not _equal(before[key], after[key]):
            yield f"{key} was {before[key]!r} and is {after[key]!r}"


def _equal(before: Any, after: Any) -> bool:
    """Of plain values; tensors and objects are the same or not."""
    return (
        type(before) is type(after)
        and isinstance(before, (bool, int, float, str, tuple, set))
        and before == after
    )


def check_ordinary(model: nn.Module, before: Structure, plain: nn.Module, calculate: Any) -> None:
    """`model`, whose engine was destroyed, is what it was `before`, and calculates what `plain`
    does with its weights.

    calculate: ``model -> list of numbers or tensors`` in training mode, the same each time.
    """
    import torch

    left = before.differences(model)
    assert not left, (
        f"after engine.destroy() the model is not what it was: {'; '.join(left[:8])}; give "
        "ctx.undo a step for each "
        "change, or make it inside ds_run_state.changes.changing(model, ctx.undo)"
    )
    plain.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    wanted = calculate(plain.train())
    copied_gives = calculate(copied.train())
    for what, found in (("it", calculate(model.train())), ("its copy", copied_gives)):
        for mine, theirs in zip(found, wanted, strict=True):
            alike = torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
            assert alike, f"after engine.destroy() {what} gives {mine}, and a plain model {theirs}"


def _own(whole: Tensor, param: Tensor, piece: Slice | None) -> Tensor:
    """What a rank's own model has of `whole`: all, or less where it was built with a part, as
    experts are.
    """
    import torch

    for dim, size in enumerate(param.shape):
        if size != whole.shape[dim] and piece is not None:
            whole = torch.cat([whole.narrow(dim, *kept) for kept in piece.ranges[dim]], dim)
    return whole


def given_back(names: list[Any], extra: dict[str, Any], one_process: bool) -> dict[str, float]:
    """On a rank, for `ShardedTransformConformance`.

    one_process: the model can be called without an engine.
    """
    import torch
    from ds_run_state.slices import SLICES

    from ds_testing.kits.parallel.runner import data_place
    from ds_testing.kits.parallel.sharded_steps import (
        Truth,
        cast_batch,
        functions_of,
        loss_in,
        made,
        one_step,
        plain_optimizer,
        started,
    )
    from ds_testing.truth import relative

    make, make_batch, make_truth = functions_of(names)
    model = made(make, torch.float64)
    truth = Truth(make_truth, make_batch, torch.float64)
    before = Structure(model)
    found: dict[str, float] = {}
    for turn, sections in enumerate([extra, {}, extra] if one_process else [extra, extra]):
        engine = started(model, sections)
        truth.optimizer = plain_optimizer(truth.model)
        ranks, index = data_place(engine.ctx.mesh)
        one_step(engine, [cast_batch(make_batch(turn, 0, index), torch.float64)], torch.float64)
        truth.step(turn, ranks)
        copies = [copy.deepcopy(engine.module)]
        rank = engine.global_rank
        slices = engine.ctx.stash.get(SLICES) or {}
        engine.destroy()
        assert not (left := before.differences(model)), (
            f"after engine.destroy(), not as before: {'; '.join(left[:8])}"
        )
        copies.append(copy.deepcopy(model))
        weights = dict(truth.model.named_parameters())
        for name, param in model.named_parameters():
            if name in weights:
                found[f"run {turn}: {name}"] = relative(
                    param, _own(weights[name], param, slices.get(name))
                )
        # each rank has its own, and none waits for others
        batch = cast_batch(make_batch(9, 0, rank), torch.float64)
        for part in (model, copies[-1]) if one_process else ():
            wanted = loss_in(truth.model, batch, torch.float64).item()
            found[f"run {turn}: a loss afterwards"] = abs(
                loss_in(part, batch, torch.float64).item() - wanted
            )
    return found
