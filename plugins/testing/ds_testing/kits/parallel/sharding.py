"""`ShardedTransformConformance`: does a model whose parts lie on several ranks train as the whole
one?

Subclass it for a plugin that divides the work of a model among the ranks of a mesh axis: rows and
columns of weights, the tokens of a sequence, and so on. Set `axis`, `configs` and `cut`, give
`make_model` and `make_batch`, and pytest compares with one process of plain torch: losses, norms
and weights, with frozen parameters and in 16 bits; what each rank has; evaluation; checkpoints and
exports that are read at other sizes of the axis.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ds_testing.kits.parallel.given_back import given_back
from ds_testing.kits.parallel.runner import data_place, default_batch, default_model
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
from ds_testing.pool import reference, run_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 3e-2}
CLIP = 0.3


class ShardedTransformConformance:
    """Subclass me; see the module's docstring.

    The name must start with Test, so that pytest collects it.
    """

    axis: ClassVar[str] = ""
    """The mesh axis."""
    configs: ClassVar[Mapping[int, Mapping[str, Any]]] = {}
    """Its size -> the sections that make it so long. Every size but 1 is tested; 1 is how
    checkpoints are read without the axis (default: without any section).
    """
    cut: ClassVar[tuple[str, ...]] = ()
    """Regular expressions, each matches the whole names of parameters of which a rank has a part;
    none where only the work is divided.
    """
    frozen: ClassVar[tuple[str, ...]] = ()
    """As `cut`, of parameters that some cases freeze."""
    load: ClassVar[tuple[str, ...]] = ()
    """Modules for ``plugins.load``, where the plugin is not installed."""
    make_model = staticmethod(default_model)
    """``() -> module`` whose output holds a scalar loss; a module-level function, given as
    ``staticmethod``.
    """
    make_batch = staticmethod(default_batch)
    """``(step, micro, index) -> batch``, the same along an axis of model parallelism."""
    make_truth: ClassVar[Any] = None
    """The model of one process with the same names, where `make_model` is not one (pipelines)."""
    data: ClassVar[tuple[int, ...]] = (1, 2)
    """Numbers of data-parallel ranks."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"": {}}
    """By name, what is added to the config, such as ZeRO stages."""
    gas: ClassVar[tuple[int, ...]] = (1, 2)
    """Micro-batches per step: a further factor. `cases` chooses of the product of all."""
    clip: ClassVar[tuple[float, ...]] = (0.0, CLIP)
    """Gradient clipping: a further factor."""
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32", "bfloat16")
    """A further factor."""
    initialized_alike: ClassVar[bool] = False
    """Whether `make_model` gives each rank the same weights whatever its seed; otherwise ranks must
    agree on those of the first.
    """
    alone: ClassVar[bool | None] = None
    """Whether one rank can call the model without an engine (default: without `make_truth`)."""
    checkpoints: ClassVar[bool] = True
    """Whether the checks of checkpoints apply."""
    exports: ClassVar[bool] = True
    """Whether the checks of exports apply."""
    timeout: ClassVar[float] = 300.0

    @classmethod
    def cases(cls, size: int, data: int) -> list[tuple[str, int, float, str]]:
        """(variant, gas, clip, dtype) of the cases for an axis of `size` and `data` data ranks.

        By default each variant in every dtype, with the other factors in turn.
        """
        turns = itertools.cycle(itertools.product(cls.gas, cls.clip))
        return [(v, *next(turns), d) for v, d in itertools.product(cls.variants, cls.dtypes)]

    def _sizes(self) -> list[int]:
        sizes = sorted(size for size in self.configs if size > 1)
        assert self.axis, "set `axis`: the name of the mesh axis along which the model is divided"
        assert sizes, "set `configs`: size of the axis -> sections; at least one size is above 1"
        return sizes

    def _run(self, world: int, size: int, function: Any, *arguments: Any) -> list[Any]:
        cls = type(self)
        truth = cls.make_truth or cls.make_model
        make = cls.make_model if size in self.configs else truth
        names = [reference(f) for f in (make, cls.make_batch, truth)]
        config = {
            **self.configs.get(size, {}),
            "plugins": {"load": list(self.load if size in self.configs else ())},
        }
        return run_ranks(world, function, names, config, *arguments, timeout=self.timeout)

    def test_trains_as_one_process(self) -> None:
        """Losses, gradient norms and weights of three steps: by hand and by `train_batch`, also
        with frozen weights.
        """
        for size, data in itertools.product(self._sizes(), self.data):
            cases = self.cases(size, data)
            rows = [[dict(self.variants[variant]), *rest] for variant, *rest in cases]
            for rank, answers in enumerate(
                self._run(size * data, size, _train_all, rows, list(self.frozen))
            ):
                for (variant, gas, clip, dtype), found in zip(cases, answers, strict=True):
                    where = (
                        f"{self.axis} {size} x data {data}, {variant or 'plain'}, gas {gas}, "
                        "clip "
                        f"{clip}, {dtype}"
                    )
                    for what, error in found.items():
                        assert error <= TOLERANCE[dtype], (
                            f"rank {rank} of {where}: {what} is off by {error:.3g} (relative) from "
                            "one process, "
                            f"allowed {TOLERANCE[dtype]:.0e}"
                        )

    def test_ranks_hold_the_parts_of_one_whole(self) -> None:
        """The parts of parameters in `cut` make the whole, without gaps; they and no others are
        held on the axis.

        The wholes are the weights of the first rank's model, though ranks were seeded differently.
        """
        import torch

        for size in self._sizes():
            ranks = self._run(size, size, _parts_of, self.axis, self.initialized_alike)
            wholes = {name: whole for rank in ranks for name, whole in rank["whole"].items()}
            for pattern in self.cut:
                assert any(re.fullmatch(pattern, n) for n in wholes), (
                    f"cut: no parameter is {pattern!r}: {set(wholes)}"
                )
            for name, whole in wholes.items():
                parts = [rank["parts"][name] for rank in ranks if name in rank["parts"]]
                if any(re.fullmatch(pattern, name) for pattern in self.cut):
                    assert all(self.axis in part["held"] for part in parts), (
                        f"{name} is cut, but ds_param_axes does not put it on {self.axis!r}: "
                        f"{parts[0]['held']}"
                    )
                    assert all(part["sliced"] for part in parts), (
                        f"{name} is cut, but it is not in ds_run_state.SLICES"
                    )
                    most = max(part["numel"] for part in parts)
                    assert most < whole.numel(), f"{self.axis} {size}: a rank has all of {name}"
                else:
                    assert self.axis not in parts[0]["held"], (
                        f"{name} is on {self.axis!r} and not in `cut`"
                    )
                    assert all(torch.equal(p["value"], parts[0]["value"]) for p in parts), (
                        f"{name} is not cut, but ranks along {self.axis!r} start with different "
                        "values; "
                        "they must agree on those of the first"
                    )
                off = (whole - ranks[0]["truth"][name]).abs().max()
                assert not off, (
                    f"the parts of {name} are not those of the first rank's model: off by "
                    f"{float(off):.3g}"
                )

    def test_what_is_not_cut_stays_the_same(self) -> None:
        """After training, all ranks have the same bits of what they share, and one gradient
        norm."""
        import torch

        for size, data in itertools.product(self._sizes(), self.data):
            ranks = self._run(size * data, size, _trained)
            assert len({rank["norm"] for rank in ranks}) == 1, (
                f"gradient norms are {[r['norm'] for r in ranks]}"
            )
            first: dict[tuple[str, str], Any] = {}
            for name, (place, value) in (
                (n, v) for rank in ranks for n, v in rank["weights"].items()
            ):
                if not any(re.fullmatch(pattern, name) for pattern in self.cut):
                    assert torch.equal(first.setdefault((name, place), value), value), (
                        f"{self.axis} {size} x data {data}: {name} differs between ranks after two "
                        "steps; sum its "
                        f"gradient over {self.axis!r} where its ranks use it for different elements"
                    )

    def test_evaluation(self) -> None:
        """`eval_batch` and a forward in eval mode give the loss of one process, and change
        nothing."""
        for size in self._sizes():
            for rank, found in enumerate(self._run(size, size, _evaluated)):
                for what, error in found.items():
                    assert error <= 1e-12, (
                        f"{self.axis} {size}, rank {rank}: {what} is off by {error:.3g}"
                    )

    def test_an_optimizer_of_the_users(self) -> None:
        """One that was made from the model's parameters before `initialize` updates what ranks have
        now.
        """
        for size in self._sizes():
            for rank, found in enumerate(self._run(size, size, _own_optimizer)):
                for what, error in found.items():
                    assert error <= 1e-12, (
                        f"{self.axis} {size}, rank {rank}: with an optimizer that was made before, "
                        f"{what} is off by "
                        f"{error:.3g}; give parameters their parts by `param.data = ...`, so that "
                        "they stay the same"
                    )

    def test_it_is_given_back(self) -> None:
        """After `destroy` each rank's module is an ordinary, whole one, and trains as plain
        torch."""
        alone = self.make_truth is None if self.alone is None else self.alone
        for size in self._sizes():
            for rank, found in enumerate(self._run(size, size, given_back, alone)):
                for what, error in found.items():
                    assert error <= 1e-12, (
                        f"{self.axis} {size}, rank {rank}: {what} is off by {error:.3g}"
                    )

    def test_checkpoints_at_other_sizes(self, tmp_path: Path) -> None:
        """What was saved at one size goes on at any other, without the axis too, as if it had never
        stopped.
        """
        if not self.checkpoints:
            return
        for saved in self._sizes():
            folder = str(tmp_path / str(saved))
            data, *_ = self._run(saved, saved, _save, folder)
            for size in sorted({1, *self._sizes()}):
                for rank, found in enumerate(self._run(size, size, _go_on, folder, data)):
                    for what, error in found.items():
                        assert error <= 1e-12, (
                            f"saved with {self.axis} {saved}, loaded with {size}, rank {rank}: "
                            f"{what} is off by "
                            f"{error:.3g}"
                        )

    def test_exports_have_the_whole(self, tmp_path: Path) -> None:
        """`save_16bit_model` writes what the model that was never divided loads, and calculates the
        same with.
        """
        if not self.exports:
            return
        for size in self._sizes():
            for found in self._run(size, size, _export, str(tmp_path / str(size))):
                assert found == "", f"{self.axis} {size}: {found}"


# -- on the ranks ----------------------------------------------------------------------------------


def _train_all(
    names: list[Any], extra: dict[str, Any], cases: list[Any], frozen: list[str]
) -> list[dict[str, float]]:
    """Every other case is driven by hand, every third has frozen parameters."""
    return [
        _train(
            names,
            {**extra, **variant},
            gas,
            clip,
            dtype,
            frozen if number % 3 == 2 else [],
            number % 2 == 0,
        )
        for number, (variant, gas, clip, dtype) in enumerate(cases)
    ]


def _train(
    names: list[Any],
    extra: dict[str, Any],
    gas: int,
    clip: float,
    dtype: str,
    frozen: list[str],
    by_hand: bool,
) -> dict[str, float]:
    import torch

    from ds_core import comm
    from ds_testing.truth import relative, whole_weights

    make, make_batch, make_truth = functions_of(names)
    wide = torch.float32 if dtype == "bfloat16" else getattr(torch, dtype)
    keys: dict[str, Any] = {"gradient_accumulation_steps": gas, "gradient_clipping": clip}
    if dtype == "bfloat16":
        keys["bf16"] = {"enabled": True}
    engine = started(made(make, wide, frozen), extra, **keys)
    own = getattr(torch, dtype)
    (ranks, index) = data_place(engine.ctx.mesh)
    truth = Truth(make_truth, make_batch, wide, frozen)
    first = {n: p.detach().clone() for n, p in truth.model.named_parameters()}
    worst = {"loss": 0.0, "norm": 0.0}
    for step in range(3):
        batches = [cast_batch(make_batch(step, micro, index), own) for micro in range(gas)]
        ours = one_step(engine, batches, own, by_hand=by_hand)
        theirs, norm = truth.step(step, ranks, gas, clip)
        worst["loss"] = max(worst["loss"], abs(ours - theirs) / max(abs(theirs), 1e-3))
        worst["norm"] = max(
            worst["norm"], abs(float(engine.get_global_grad_norm()) - norm) / max(norm, 1e-3)
        )
    mine = whole_weights(engine)
    engine.destroy()
    weights = dict(truth.model.named_parameters())
    # of all stages of a pipeline
    anywhere = {name for names in comm.all_gather_json(list(mine)) for name in names}
    assert anywhere == set(weights), (
        f"names of parameters changed: {sorted(anywhere ^ set(weights))}"
    )
    for name, weight in ((n, w) for n, w in weights.items() if n in mine):
        worst[f"weight {name}"] = relative(mine[name], weight.detach())
        if not weight.requires_grad and dtype != "bfloat16":
            worst[f"frozen {name}"] = relative(mine[name], first[name])
    return worst


def _parts_of(names: list[Any], extra: dict[str, Any], axis: str, alike: bool) -> dict[str, Any]:
    import torch
    from ds_run_state.slices import SLICES

    from ds_core import comm
    from ds_testing.truth import whole_weights

    make, _, make_truth = functions_of(names)
    engine = started(made(make, torch.float64, seed=0 if alike else comm.rank()), extra)
    assert engine.ctx.mesh.has(axis), (
        f"the mesh {engine.ctx.mesh.describe()} has no axis {axis!r}; see ds_mesh_axes"
    )
    slices = engine.ctx.stash.get(SLICES) or {}
    held = {info.name: list(info.held) for info in engine.ctx.params.values()}
    parts = {
        n: {"held": held[n], "sliced": n in slices, "numel": p.numel(), "value": p.detach().clone()}
        for n, p in engine.module.named_parameters()
    }
    truth = {n: p.detach() for n, p in made(make_truth, torch.float64).named_parameters()}
    whole = whole_weights(engine)
    engine.destroy()
    return {"parts": parts, "whole": whole, "truth": truth}


def _trained(names: list[Any], extra: dict[str, Any]) -> dict[str, Any]:
    import torch

    make, make_batch, _ = functions_of(names)
    engine = started(made(make, torch.float32), extra)
    _, index = data_place(engine.ctx.mesh)
    for step in range(2):
        one_step(engine, [cast_batch(make_batch(step, 0, index), torch.float32)], torch.float32)
    coord = engine.ctx.mesh.coord
    places = {
        info.name: str([coord[axis] for axis in info.held]) for info in engine.ctx.params.values()
    }
    weights = {n: [places[n], p.detach().clone()] for n, p in engine.module.named_parameters()}
    found = {"weights": weights, "norm": engine.get_global_grad_norm()}
    engine.destroy()
    return found


def _evaluated(names: list[Any], extra: dict[str, Any]) -> dict[str, float]:
    import torch

    from ds_testing.truth import relative, whole_weights

    make, make_batch, make_truth = functions_of(names)
    engine = started(made(make, torch.float64), extra)
    ranks, index = data_place(engine.ctx.mesh)
    plain = made(make_truth, torch.float64).eval()
    before = whole_weights(engine)
    with torch.no_grad():
        each = [loss_in(plain, make_batch(0, 0, i), torch.float64).item() for i in range(ranks)]
        theirs = sum(each) / ranks
        batch = iter([make_batch(0, 0, index)])
        ours = engine.eval_batch(batch)
        engine.eval()
        by_hand = engine.runner.manual
        forward = (
            loss_in(engine, make_batch(0, 0, index), torch.float64).item()
            if by_hand
            else each[index]
        )
        engine.train()
    after = whole_weights(engine)
    engine.destroy()
    scale = max(abs(theirs), 1e-3)
    found = {"eval_batch": abs(float(ours) - theirs) / scale}
    found["forward in eval mode"] = abs(forward - each[index]) / scale
    return found | {f"weight {n}": relative(after[n], before[n]) for n in before}


def _own_optimizer(names: list[Any], extra: dict[str, Any]) -> dict[str, float]:
    import torch

    from ds_testing.truth import relative, whole_weights

    make, make_batch, make_truth = functions_of(names)
    model = made(make, torch.float64)
    truth = Truth(make_truth, make_batch, torch.float64)
    engine = started(model, extra, optimizer=plain_optimizer(model))
    ranks, index = data_place(engine.ctx.mesh)
    for step in range(2):
        one_step(engine, [cast_batch(make_batch(step, 0, index), torch.float64)], torch.float64)
        truth.step(step, ranks)
    whole = whole_weights(engine)
    engine.destroy()
    return {
        f"weight {n}": relative(whole[n], p.detach())
        for n, p in truth.model.named_parameters()
        if n in whole
    }


def _save(names: list[Any], extra: dict[str, Any], folder: str) -> int:
    """Two steps; the number of data-parallel ranks."""
    import torch

    make, make_batch, _ = functions_of(names)
    engine = started(made(make, torch.float64), extra)
    ranks, index = data_place(engine.ctx.mesh)
    for step in range(2):
        one_step(engine, [cast_batch(make_batch(step, 0, index), torch.float64)], torch.float64)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    engine.destroy()
    return ranks


def _go_on(names: list[Any], extra: dict[str, Any], folder: str, data: int) -> dict[str, float]:
    """The optimizer's states are loaded too: two more steps end where four of one process do."""
    import torch

    from ds_testing.truth import relative, whole_weights

    make, make_batch, make_truth = functions_of(names)
    engine = started(made(make, torch.float64, seed=1), extra)
    engine.load_checkpoint(folder)
    truth = Truth(make_truth, make_batch, torch.float64)
    (ranks, index) = data_place(engine.ctx.mesh)
    for step in range(2):
        truth.step(step, data)
    loaded = whole_weights(engine)
    wanted = {n: p.detach().clone() for n, p in truth.model.named_parameters()}
    for step in range(2, 4):
        truth.step(step, ranks)
        one_step(engine, [cast_batch(make_batch(step, 0, index), torch.float64)], torch.float64)
    went_on = whole_weights(engine)
    engine.destroy()
    found = {f"loaded weight {n}": relative(loaded[n], wanted[n]) for n in loaded}
    weights = {n: p.detach() for n, p in truth.model.named_parameters() if n in loaded}
    return found | {
        f"weight {n} two steps later": relative(went_on[n], w) for n, w in weights.items()
    }


def _export(names: list[Any], extra: dict[str, Any], folder: str) -> str:
    """What is wrong with the export, if anything is."""
    import torch
    from safetensors.torch import load_file

    from ds_core import comm
    from ds_testing.truth import relative, whole_weights

    make, _, make_truth = functions_of(names)
    engine = started(made(make, torch.float32), extra)
    engine.save_16bit_model(folder)
    whole = whole_weights(engine)
    engine.destroy()
    if comm.rank() != 0:
        return ""
    files = load_file(str(Path(folder) / "model.safetensors"))
    plain = made(make_truth, torch.float32, seed=1)
    missing, unexpected = plain.load_state_dict(files, strict=False)
    tied = {n for n, p in plain.named_parameters(remove_duplicate=False)} - {
        n for n, _ in plain.named_parameters()
    }
    if set(missing) - tied or unexpected:
        return f"it lacks {missing}, and has {unexpected}, which the model does not know"
    wrong = [
        n
        for n, p in plain.named_parameters()
        if n in whole and relative(p.detach(), whole[n].bfloat16()) > 0
    ]
    return f"{wrong} are not what was trained" if wrong else ""
