"""`PartitionerConformance`: does a partitioner train exactly as one process of plain torch would?

Subclass it, set `config` to what switches your partitioner on (and `load` to its declaration
modules when they are not installed), and pytest runs losses *and* weights against the truth at
world sizes 1, 2 and 4: uneven shapes, frozen, unused, partly used and shared parameters, several
groups, accumulation, clipping, fp64, fp32 and bf16, and products with fake pp, ep and tp axes.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import pytest

from ds_testing.pool import RemoteError, run_ranks


def __getattr__(name: str) -> Any:
    """Functions that have moved to `ds_testing.truth`."""
    if name not in ("relative", "whole_weights"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_testing import truth

    text = f"{__name__}.{name} is ds_testing.truth.{name} now"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return getattr(truth, name)


TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-2}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain-fp32-clip": {"dtype": "float32", "clip": 0.5, "gas": 2},
    "frozen-accumulate": {"model": "frozen", "gas": 3},
    "unused": {"model": "unused", "clip": 0.1},
    "partly-used": {"model": "partly", "gas": 2},
    "shared": {"model": "shared", "clip": 0.3},
    "groups": {"model": "groups", "gas": 2, "clip": 0.2},
    "sgd": {"optimizer": "SGD", "gas": 2},
    "bf16": {"dtype": "bfloat16", "gas": 2, "clip": 0.5},
    "predivide": {"predivide": 4.0},
}
PRODUCTS: dict[str, dict[str, int]] = {
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "pp2-ep2": {"pp": 2, "ep": 2},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
}

WAYS = ("manual", "train_batch", "direct")
"""Who drives training."""


def _train_params() -> Iterator[Any]:
    """(case, way, world size) of every product.

    Not slow: each case on two ranks in one of the three ways in turn, and on one rank or on four,
    so that each way meets each world size.
    """
    for number, name in enumerate(CASES):
        fast = {(WAYS[number % 3], 2), (WAYS[(number + 1) % 3], 1 if number % 2 else 4)}
        for way in itertools.product(WAYS, (1, 2, 4)):
            yield pytest.param(name, *way, marks=() if way in fast else pytest.mark.slow)


TRAINED = list(_train_params())
"""Case, who drives training, and on how many ranks, for ``parametrize(("name", "how", "world"))``."""
AXES = [
    # A single axis is also one of a product.
    name if "-" in name or name == "ep4" else pytest.param(name, marks=pytest.mark.slow)
    for name in PRODUCTS
]
"""The names of `PRODUCTS`, for ``parametrize``."""
TWICE = [("ep2", 2), ("ep2", 4), pytest.param("tp2-ep2", 4, marks=pytest.mark.slow)]
"""Products of axes, and on how many ranks, that are trained with two backwards before each step."""


class PartitionerConformance:
    """Subclass me; see the module's docstring."""

    config: ClassVar[Mapping[str, Any]] = {}
    load: ClassVar[tuple[str, ...]] = ()
    timeout: ClassVar[float] = 300.0
    refused: ClassVar[str | None] = None
    """For one that needs whole tensors: what its error says where ranks have parts of them
    (`check_grain`).
    """

    @pytest.mark.parametrize(("name", "how", "world"), TRAINED)
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        """Losses and weights equal plain torch, driven in all three ways."""
        from ds_testing.models import Case

        case = Case(**CASES[name])
        answers = run_ranks(
            world,
            _train_and_compare,
            asdict(case),
            dict(self.config),
            list(self.load),
            how,
            timeout=self.timeout,
        )
        _check(answers, TOLERANCE[case.dtype])

    @pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.slow), 0.05])
    @pytest.mark.parametrize("name", AXES)
    def test_products_of_axes(self, name: str, clip: float) -> None:
        """On 4 ranks, parameters that differ over pp, ep and tp train as in one process that holds
        them all.
        """
        self._check_axes(4, name, clip, 1)

    @pytest.mark.parametrize(("name", "world"), TWICE)
    def test_two_backwards_before_a_step(self, name: str, world: int) -> None:
        """What a first backward left behind, reduced by then, counts as much as what a second one
        adds.

        On 4 ranks along ep 2 a parameter has two replicas where dp has four ranks: its average is
        over all four.
        """
        self._check_axes(world, name, 0.05, 2)

    def _check_axes(self, world: int, name: str, clip: float, backwards: int) -> None:
        run = partial(
            run_ranks, world, _train_axes, PRODUCTS[name], clip, backwards, dict(self.config)
        )
        if self.refused is None:
            _check(run(list(self.load), timeout=self.timeout), 1e-12)
            return
        with pytest.raises(RemoteError) as caught:
            run(list(self.load), timeout=self.timeout)
        assert len(caught.value.failures) == world, "all ranks refuse"
        assert all(self.refused in str(failure) for failure in caught.value.failures), caught.value

    @pytest.mark.parametrize("world", [2, 4])
    def test_overflow_is_agreed(self, world: int) -> None:
        """An inf on one rank makes every rank skip the same step, and training goes on."""
        answers = run_ranks(
            world, _overflow, dict(self.config), list(self.load), timeout=self.timeout
        )
        assert all(a == answers[0] for a in answers), f"ranks disagree: {answers}"
        assert answers[0]["skipped"] == 1
        assert answers[0]["steps"] == 3

    @pytest.mark.parametrize("world", [1, 2])
    @pytest.mark.parametrize("name", ["unused", "shared"])
    def test_gradient_shards(self, name: str, world: int) -> None:
        """The shards that plugins see are each element of each gradient once, and what the
        optimizer gets.

        A partitioner without `gradient_shards` is not asked: a plugin that changes gradients is
        refused with it.
        """
        answers = run_ranks(
            world, _shards, CASES[name]["model"], dict(self.config), list(self.load)
        )
        _check(answers, 1e-12)


def _check(answers: list[dict[str, Any]], tolerance: float) -> None:
    for rank, answer in enumerate(answers):
        for what, error in answer.items():
            assert error <= tolerance, (
                f"rank {rank}: {what} is off by {error:.3g} (relative), allowed {tolerance:.0e}"
            )


def with_plugins(config: dict[str, Any], extra: dict[str, Any], load: list[str]) -> dict[str, Any]:
    """`config` and `extra` as one, which loads the modules of both and of `load`."""
    merged = {**config, **extra}
    given = [dict(c.get("plugins", {})) for c in (config, extra)]
    modules = [m for g in given for m in g.get("load", [])]
    merged["plugins"] = {**given[0], **given[1], "load": [*modules, *load]}
    return merged


def _train_and_compare(
    case_fields: dict[str, Any], extra: dict[str, Any], load: list[str], how: str
) -> dict[str, float]:
    import torch

    import ds_core
    from ds_core import comm
    from ds_testing.models import Case, build_model, micro_batch, param_groups, reference_run
    from ds_testing.truth import relative, train, whole_weights

    case = Case(**case_fields)
    rank = comm.rank()
    world = comm.world_size()
    truth_losses, truth = reference_run(case, world)
    # Ranks start with different weights, so that the test fails unless the partitioner makes them
    # agree on rank 0's.
    model = build_model(case, seed=rank)
    engine, *_ = ds_core.initialize(
        model=model,
        model_parameters=param_groups(case, model),
        config=with_plugins(case.config(world), extra, load),
    )

    def batch(step: int, number: int) -> dict[str, Any]:
        return micro_batch(case, step, number // world, number % world)

    if how == "train_batch":
        losses = []
        for step in range(case.steps):
            micros = [batch(step, micro * world + rank) for micro in range(case.gas)]
            mean = engine.train_batch(iter(micros)).double()
            comm.all_reduce(mean)
            losses.append(mean.item() / world)
    else:
        losses = train(engine, batch, case.steps, direct=how == "direct")
    # Relative to the loss, but not to one near 0, which would enlarge rounding.
    worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, truth_losses, strict=True))
    whole = whole_weights(engine)
    assert set(whole) == set(truth), f"names changed: {set(whole) ^ set(truth)}"
    report = {"loss": worst, **{f"weight {n}": relative(whole[n], t) for n, t in truth.items()}}
    engine.destroy()
    assert torch.is_grad_enabled()
    return report


def _shards(kind: str, extra: dict[str, Any], load: list[str]) -> dict[str, Any]:
    """What a `ds_gradients` plugin saw of one step, against plain torch; it sets zeros, so weights
    must not change.
    """
    import ds_core
    from ds_core import comm
    from ds_core.errors import UsageError
    from ds_testing.kits.train import fake_gradients
    from ds_testing.models import Case, build_model, micro_batch
    from ds_testing.truth import relative, whole_weights

    case = Case(model=kind, optimizer="SGD")
    world = comm.world_size()
    truth = build_model(case)
    model = build_model(case)
    load = [*load, "fake_gradients=ds_testing.kits.train.fake_gradients"]
    config = with_plugins(case.config(world), {**extra, "fake_gradients": {}}, load)
    try:
        engine, *_ = ds_core.initialize(model=model, config=config)
    except UsageError as error:
        # `gradient_shards` is optional: the refusal of the plugin is a correct answer.
        if "has no gradient_shards" in str(error):
            return {}
        raise
    before = whole_weights(engine)
    # The truth sees the micro-batches of all ranks, with the weight of their mean.
    for index in range(world):
        (truth(**micro_batch(case, 0, 0, index)) / world).backward()
    engine.backward(engine(**micro_batch(case, 0, 0, comm.rank())))
    engine.step()
    seen = engine.ctx.stash[fake_gradients.SEEN]
    after = whole_weights(engine)
    engine.destroy()
    grads = {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    report = {
        f"gradient {n}": abs(seen.sums.get(n, 0.0) - g.sum().item()) for n, g in grads.items()
    }
    report |= {f"{n} left": relative(after[n], before[n]) for n in before}
    norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    elements = sum(g.numel() for g in grads.values())
    return {
        **report,
        "norm": abs(seen.norm - norm),
        "squares": abs(seen.root - norm),
        "elements": elements - seen.count,
    }


# -- products of axes ------------------------------------------------------------------------------


def _train_axes(
    axes: dict[str, int], clip: float, backwards: int, extra: dict[str, Any], load: list[str]
) -> dict[str, float]:
    """Train small heads, each held on some axes; the truth has the heads of all ranks.

    backwards: how many there are before each step, each of other data.
    """
    import torch

    from ds_core import comm
    from ds_testing.truth import relative, start, whole_weights

    names = _head_names(axes)
    adamw: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    config = {
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": adamw},
        "fake_axes": {"axes": axes},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    world = comm.world_size()
    coords = [_coords(axes, world, r) for r in range(world)]
    mine = coords[comm.rank()]
    model = torch.nn.ModuleDict({n: _head(n, mine) for n in names}).double()
    engine = start(model, **with_plugins(config, extra, load))
    dp = engine.ctx.mesh.size("dp")
    # The truth: every head that any rank has, once for each place at which it is held.
    heads = {(n, _key(n, c)): _head(n, c).double() for c in coords for n in names}
    optimizer = torch.optim.AdamW([p for h in heads.values() for p in h.parameters()], **adamw)
    worst_norm = 0.0
    for step in range(3):
        for turn in range(backwards):
            x = _axes_data(step, mine["dp"], turn)
            engine.backward(sum(model[n](x).square().mean() for n in names))
        engine.step()
        seen = set()
        for c in coords:
            for n in names:
                # Ranks that differ on other axes only have the same head and data: count once.
                if (n, _key(n, c), c["dp"]) not in seen:
                    seen.add((n, _key(n, c), c["dp"]))
                    for turn in range(backwards):
                        x = _axes_data(step, c["dp"], turn)
                        (heads[n, _key(n, c)](x).square().mean() / dp).backward()
        parameters = [p for h in heads.values() for p in h.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or 1e9)
        ours = engine.get_global_grad_norm()
        assert ours is not None
        worst_norm = max(worst_norm, abs(ours - norm.item()) / norm.item())
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_weights(engine)
    report = {"norm": worst_norm}
    for n in names:
        for part, truth in heads[n, _key(n, mine)].named_parameters():
            report[f"weight {n}.{part}"] = relative(whole[f"{n}.{part}"], truth.detach())
    engine.destroy()
    return report


def _head_names(axes: dict[str, int]) -> list[str]:
    """Heads held on nothing, on each axis alone, and on all together."""
    alone = [f"held_{a}" for a in axes]
    return ["everywhere", *alone, *(["held_" + "_".join(axes)] if len(axes) > 1 else [])]


def _coords(axes: dict[str, int], world: int, rank: int) -> dict[str, int]:
    from ds_core.entries import Axis
    from ds_core.mesh import plan_mesh

    mesh = plan_mesh(
        [Axis(n, s, inside="dp" if n == "ep" else None) for n, s in axes.items()], world, rank
    )
    return {**mesh.coord, "dp": mesh.index("dp")}


def _key(name: str, coord: dict[str, int]) -> tuple[int, ...]:
    from ds_testing.kits.parallel.fake_axes import held_axes

    return tuple(coord[a] for a in held_axes(name + ".x"))


def _head(name: str, coord: dict[str, int]) -> Any:
    """A linear layer whose initial weights depend on its name and on where it is held."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(
            sum(map(ord, name))
            + sum(10 ** (i + 3) * (k + 1) for i, k in enumerate(_key(name, coord)))
        )
        return torch.nn.Linear(5, 3)


def _axes_data(step: int, dp_index: int, turn: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * turn + 100 * step + dp_index)
    return torch.randn(2, 5, dtype=torch.float64, generator=generator)


def _overflow(extra: dict[str, Any], load: list[str]) -> dict[str, Any]:
    import torch

    import ds_core
    from ds_core import comm
    from ds_testing.models import Case, build_model, micro_batch
    from ds_testing.truth import whole_weights

    case = replace(Case(), dtype="float32")
    config = with_plugins(case.config(comm.world_size()), extra, load)
    engine, *_ = ds_core.initialize(model=build_model(case), config=config)
    for step in range(3):
        batch = micro_batch(case, step, 0, comm.rank())
        if step == 1 and comm.rank() == comm.world_size() - 1:
            # Only one rank's gradients are not finite; the others must learn of it.
            batch["x"] = torch.full_like(batch["x"], torch.nan)
        engine.backward(engine(**batch))
        engine.step()
    finite = all(bool(torch.isfinite(w).all()) for w in whole_weights(engine).values())
    answer = {"skipped": engine.skipped_steps, "steps": engine.global_steps, "finite": finite}
    engine.destroy()
    return answer
