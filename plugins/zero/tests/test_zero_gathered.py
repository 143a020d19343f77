"""Partitioned weights read and written: GatheredParameters, load_state_dict, apply, external
parameters, generation.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError

D = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.small = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.frozen(self.b(torch.tanh(self.a(x))))) * self.small.sum()


def start(
    stage: int,
    dtype: str = "float32",
    model: nn.Module | None = None,
    optimizer: str = "SGD",
    **section: Any,
) -> Any:
    import ds_core

    torch.manual_seed(0)
    disk = section.pop("disk", None)
    elsewhere = {"disk": {"path": disk}, "plugins": {"load": [f"disk={DISK}"]}} if disk else {}
    engine, *_ = ds_core.initialize(
        model=Net() if model is None else model,
        config=elsewhere
        | {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": dtype == "bfloat16"},
            "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "param_persistence_threshold": 3, **section},
        },
    )
    return engine


def step(engine: Any, seed: int = 0) -> None:
    from ds_core import comm

    x = torch.randn(4, D, generator=torch.Generator().manual_seed(10 * seed + comm.rank()))
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean())
    engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    from ds_testing.kits.train.partitioner import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found


def unused_are_sharded(engine: Any) -> None:
    """Nothing is gathered or kept."""
    for unit in getattr(engine.partitioner, "units", ()):
        assert not unit.is_unsharded and not unit.uses, unit.bucket.names
    if engine.partitioner.section.stage == 3:
        assert engine.partitioner.gathering.live == 0


def check_writes(stage: int, dtype: str, optimizer: str, section: dict[str, Any]) -> None:
    """What a rank wrote is the weight everywhere, and stays it when a step with lr 0 publishes the
    masters.
    """
    from ds_core import comm

    engine = start(stage, dtype, optimizer=optimizer, **section)
    step(engine)
    last = comm.world_size() - 1
    before = weights(engine)
    module = engine.module
    for rank in (0, last):
        with ds_zero.GatheredParameters(module, modifier_rank=rank), torch.no_grad():
            for param in module.parameters():
                param.fill_(10.0 * comm.rank() + rank)
            module.a.bias.data = torch.full((D,), 7.0 + comm.rank(), dtype=module.a.bias.dtype)
        unused_are_sharded(engine)
        for name, value in weights(engine).items():
            assert bool((value == (7.0 + rank if name == "a.bias" else 11.0 * rank)).all()), (
                name,
                rank,
            )
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        step(engine)
        for name, value in weights(engine).items():
            assert bool((value == (7.0 + rank if name == "a.bias" else 11.0 * rank)).all()), (
                name,
                rank,
            )
    module.load_state_dict({n: v.to(module.a.bias.dtype) for n, v in before.items()}, strict=False)
    step(engine)
    found = weights(engine)
    assert all(torch.equal(found[n], v) for n, v in before.items())
    unused_are_sharded(engine)
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_reach_every_rank_and_the_masters(stage: int, world: int) -> None:
    run_ranks(world, check_writes, stage, "bfloat16" if world < 4 else "float32", "SGD", {})


CPU = {"device": "cpu"}
DISK = "plugins.zero.tests.disk_store"
FAR = {"device": "disk", "max_in_cpu": 0}
OFFLOADED: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bfloat16", {"offload_optimizer": CPU}),
    (2, "float32", {"offload_optimizer": CPU}),
    (3, "bfloat16", {"offload_optimizer": CPU, "offload_param": CPU}),
    (3, "float32", {"offload_param": CPU}),
    (3, "float32", {"offload_optimizer": CPU, "offload_param": CPU}),
    (3, "bfloat16", {"offload_optimizer": {"device": "disk"}, "offload_param": FAR}),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "dtype", "section"), OFFLOADED)
def test_writes_reach_masters_that_rest_elsewhere(
    stage: int, dtype: str, section: dict[str, Any], world: int, tmp_path: Path
) -> None:
    disk = {"disk": str(tmp_path)} if "disk" in str(section) else {}
    run_ranks(world, check_writes, stage, dtype, "AdamW", section | disk)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stage", [2, 3])
def test_writes_reach_masters_that_are_whole_tensors(stage: int, dtype: str) -> None:
    run_ranks(2, check_writes, stage, dtype, "Adafactor", {})


def check_reads() -> None:
    from ds_core import comm

    engine = start(3)
    module = engine.module
    truth = weights(engine)
    gathered = ds_zero.GatheredParameters

    def whole(*params: nn.Parameter) -> None:
        assert all(p.shape == p.ds_shape for p in params)

    with gathered(module.a.weight):
        whole(module.a.weight)
        assert torch.equal(module.a.weight.double(), truth["a.weight"])
        assert module.b[0].weight.numel() == 0
        with gathered([module.b[0].weight, nn.Parameter(torch.ones(3))]):
            whole(module.a.weight, module.b[0].weight)
        with (
            pytest.raises(UsageError, match=r"'a.weight' is in an outer GatheredParameters"),
            gathered(module),
        ):
            pass
        whole(module.a.weight)
        step(engine)  # the context outlasts a whole step, and sees the new weights
        whole(module.a.weight)
        assert torch.equal(module.a.weight.double(), weights(engine)["a.weight"])
        ds_zero.empty_partition_cache(engine)
        whole(module.a.weight)
    unused_are_sharded(engine)
    with (
        gathered(module, enabled=False),
        gathered(nn.Linear(2, 2)),
        gathered([]),
        gathered(iter([module.a.bias])),
    ):
        assert module.b[0].weight.numel() == 0
        whole(module.a.bias)
    unused_are_sharded(engine)

    # Inside a forward, and with weights that are kept between forward and backward.
    seen = []
    handle = module.b[0].register_forward_pre_hook(
        lambda *_: [seen.append(p.sum().item()) for p in module.parameters() if p.numel()] and None
    )
    loss = engine(torch.ones(4, D)).sum()
    with gathered(module):
        assert torch.equal(module.b[0].weight.double(), weights(engine)["b.0.weight"])
    with gathered(module.a, modifier_rank=0), torch.no_grad():
        module.a.bias.add_(comm.rank() + 1.0)
    engine.backward(loss)
    unused_are_sharded(engine)
    engine.step()
    handle.remove()
    assert seen

    # Kept weights go when asked, and backward gathers them again.
    loss = engine(torch.ones(4, D)).sum()
    assert engine.partitioner.gathering.live > 0
    ds_zero.empty_partition_cache(engine)
    assert engine.partitioner.gathering.live == 0
    engine.backward(loss)
    engine.step()

    # After an error nothing is written; without a modifier nothing is kept.
    truth = weights(engine)
    with pytest.raises(ArithmeticError), gathered(module, modifier_rank=0):
        module.a.weight.data.zero_()
        raise ArithmeticError
    with gathered(module.a.weight):
        module.a.weight.data.zero_()
    assert torch.equal(weights(engine)["a.weight"], truth["a.weight"])
    with (
        pytest.raises(
            UsageError, match=r"'a.weight' of shape \(6, 6\) was given data of shape \(3,\)"
        ),
        gathered(module.a.weight, modifier_rank=0),
    ):
        module.a.weight.data = torch.ones(3)
    unused_are_sharded(engine)
    with gathered(module.a.weight):
        assert torch.equal(module.a.weight.double(), truth["a.weight"])
    with pytest.raises(UsageError, match="modifier_rank 2 is not a rank; this run has 0 to 1"):
        gathered(module, modifier_rank=2)
    with pytest.raises(UsageError, match="takes parameters or a module, not int"):
        gathered(3)
    context = gathered(module)
    context.__enter__()
    engine.destroy()
    context.__exit__(None, None, None)
    assert torch.equal(module.a.weight.double(), truth["a.weight"])


def test_reads() -> None:
    run_ranks(2, check_reads)


def check_sanity(stage: int) -> None:
    engine = start(stage, enable_sanity_checks=True)
    truth = weights(engine)
    for name in ("a.weight", "small"):
        param = engine.module.get_parameter(name)
        with (
            pytest.raises(
                UsageError,
                match=f"'{name}' was written inside GatheredParameters without modifier_rank",
            ),
            ds_zero.GatheredParameters(param),
        ):
            param.data[0] += 1.0
        assert torch.equal(weights(engine)[name], truth[name])
    step(engine)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_without_a_modifier_are_found_out(stage: int) -> None:
    run_ranks(2, check_sanity, stage)


def check_several_engines() -> None:
    first = start(3)
    second = start(2)
    third = start(3)
    models = [e.module for e in (first, second, third)]
    with (
        ds_zero.GatheredParameters([p for m in models for p in m.parameters()], modifier_rank=0),
        torch.no_grad(),
    ):
        for number, model in enumerate(models):
            for param in model.parameters():
                param.fill_(number)
    for number, engine in enumerate((first, second, third)):
        assert all(bool((v == number).all()) for v in weights(engine).values())
    part = nn.Sequential(first.module.a)
    with pytest.raises(
        UsageError, match=r"parameter '0.weight' of the model belongs to .* call destroy\(\)"
    ):
        start(3, model=part)
    part.requires_grad_(False)  # what is not trained may be shared, but not what is partitioned
    with pytest.raises(
        UsageError,
        match=r"parameter '0.weight' is partitioned by another engine; call that engine's",
    ):
        start(3, model=part)
    part.requires_grad_(True)
    joint = first(torch.ones(4, D)).sum() + third(torch.ones(4, D)).sum()
    joint.backward()
    for engine in (first, third):
        unused_are_sharded(engine)
        engine.step()
        unused_are_sharded(engine)
    for engine in (first, second, third):
        engine.destroy()


def test_several_engines() -> None:
    run_ranks(2, check_several_engines)


# -- torch's own calls -----------------------------------------------------------------------------


def check_placeholders(engine: Any, names: list[str], said: list[str]) -> None:
    """Partitioned weights are empty in a state dict, also while they happen to be gathered, and
    loading them changes nothing; what one rank refuses, all do."""
    from ds_core import comm

    module = engine.module
    rank = comm.rank()
    partitioned = {n for n, p in module.named_parameters() if not p.ds_persist}
    step(engine)
    # weights are kept for a backward that never comes
    engine(torch.ones(4, D, dtype=torch.bfloat16))
    assert any(module.get_parameter(n).numel() for n in partitioned), "none was kept"
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    before = weights(engine)
    loaded = torch.load(file)
    assert list(loaded) == names
    assert {
        n for n, t in loaded.items() if not t.numel()
    } == partitioned and "a.weight" in partitioned
    assert (loaded["a.weight"].shape, loaded["a.weight"].dtype) == ((0,), torch.bfloat16)
    module.load_state_dict(loaded)
    after = weights(engine)
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert [text.partition(":")[0] for text in said] == (
        [] if rank else ["state_dict()", "load_state_dict()"]
    )
    with pytest.raises(RuntimeError, match="size mismatch for a.weight"):
        Net().load_state_dict(loaded)
    with pytest.raises(RuntimeError, match=r"size mismatch for a.weight.*of this rank"):
        module.load_state_dict({**loaded, "a.weight": torch.ones(2, 2)} if rank else loaded)
    # on ranks without the file
    for given in (loaded["a.weight"], torch.empty(D, D, device="meta")):
        step(engine)
        module.load_state_dict({**loaded, "a.weight": given if rank else torch.ones(D, D)})
        assert bool((weights(engine)["a.weight"] == 1).all())


def check_state_dicts(stage: int, folder: str, section: dict[str, Any]) -> None:
    from ds_core import comm

    said: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_zero").addHandler(watch)
    engine = start(stage, "bfloat16", **section)
    module = engine.module
    names = list(Net().state_dict())
    assert list(module.state_dict(keep_vars=True)) == names
    if stage == 3:
        check_placeholders(engine, names, said)
    with ds_zero.GatheredParameters(module):
        state = {n: t.clone() for n, t in module.state_dict().items()}
    assert list(state) == names and state["a.weight"].shape == (D, D)

    new = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in state.items()}
    for tensor in new.values():
        comm.broadcast(tensor, src=0)
    # weights are kept for a backward that never comes
    engine(torch.ones(4, D, dtype=torch.bfloat16))
    for assign in (False, True):
        # For what is partitioned the first rank's counts; the rest every rank loads for itself.
        given = {
            n: t + 1 if comm.rank() and n == "a.weight" and stage == 3 else t
            for n, t in new.items()
        }
        module.load_state_dict(given, assign=assign)
    found = weights(engine)
    assert all(torch.equal(found[n], new[n].double()) for n in found)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step(engine)
    found = weights(engine)
    assert all(torch.equal(found[n], new[n].double()) for n in found), "the masters did not follow"

    with pytest.raises(RuntimeError, match=r"size mismatch for a.weight"):
        module.load_state_dict({**new, "a.weight": torch.ones(2, 2)})
    with pytest.raises(RuntimeError, match="Missing key.*b.0.bias"):
        module.load_state_dict({n: t for n, t in new.items() if n != "b.0.bias"})
    module.a.load_state_dict({"weight": torch.ones(D, D)}, strict=False)
    found = weights(engine)
    assert bool((found["a.weight"] == 1).all())
    assert torch.equal(found["a.bias"], new["a.bias"].double())
    step(engine)
    assert bool((weights(engine)["a.weight"] == 1).all())

    engine.save_checkpoint(folder)
    with ds_zero.GatheredParameters(module, modifier_rank=0):
        module.a.weight.data.zero_()
    loaded = []

    def load(tensors: dict[str, Tensor], target: nn.Module) -> None:
        loaded.append(list(tensors))
        target.load_state_dict({n: t + 1 if n == "a.weight" else t for n, t in tensors.items()})

    engine.load_checkpoint(folder, custom_load_fn=load)
    assert sorted(loaded[0]) == sorted(names)
    step(engine)
    found = weights(engine)
    assert bool((found["a.weight"] == 2).all())
    assert torch.equal(found["a.bias"], new["a.bias"].double())
    engine.destroy()
    assert list(module.state_dict()) == names


@pytest.mark.parametrize(
    "section", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "offload"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_dicts_and_custom_loading(
    stage: int, section: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(2, check_state_dicts, stage, str(tmp_path), section)


@pytest.mark.slow
def test_state_dicts_on_four_ranks(tmp_path: Path) -> None:
    run_ranks(4, check_state_dicts, 3, str(tmp_path), {})


def check_apply() -> None:
    from ds_core import comm

    seen: dict[str, tuple[int, ...]] = {}

    def start_linear(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen[str(id(module))] = tuple(module.weight.shape)
            with torch.no_grad():
                module.weight.fill_(comm.rank() + 3.0)
        if isinstance(module, nn.Sequential):
            module[0].bias.data.fill_(comm.rank() + 4.0)  # of a child

    engine = start(3)
    assert engine.module.apply(start_linear) is engine.module
    unused_are_sharded(engine)
    assert set(seen.values()) == {(D, D)}
    found = weights(engine)
    assert bool((found["a.weight"] == 3).all()) and bool((found["b.0.bias"] == 4).all())
    module = engine.module
    engine.destroy()
    assert "apply" not in vars(module) and "apply" not in vars(module.a)

    seen.clear()
    engine = start(3, override_module_apply=False)
    before = weights(engine)
    assert type(engine.module.apply).__name__ == "method" and "apply" not in vars(engine.module)
    engine.module.apply(start_linear)
    assert set(seen.values()) == {(0,)}
    assert torch.equal(weights(engine)["a.weight"], before["a.weight"])
    engine.destroy()

    for override in (True, False):
        section = {"stage": 3, "override_module_apply": override}
        run = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": section,
        }
        with ds_zero.Init(config_dict_or_path=run):
            model = Net()
        assert ("apply" in vars(model.a), "apply" in vars(model)) == (override, override)


def test_apply() -> None:
    run_ranks(2, check_apply)


# -- parameters used elsewhere, modules that come later --------------------------------------------


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, D))


class User(nn.Module):
    """Uses a parameter that nothing tells of: it goes by a list."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.inside = nn.Identity()
        self.hidden = [weight]

    def forward(self, x: Tensor) -> Any:
        return F.linear(self.inside(x), self.hidden[0])


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.user = User(self.holder.weight)
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.user(self.first(x))


def check_external(early: bool, by_context: bool) -> None:
    from ds_core import comm

    with ds_zero.Init(enabled=early):
        torch.manual_seed(0)
        model = Outside()
    register = ds_zero.register_external_parameter
    unregister = ds_zero.unregister_external_parameter
    stranger = nn.Parameter(torch.ones(2))
    weight = model.holder.weight
    if early:
        register(model.user, weight)
        register(model.user, stranger)
        with pytest.raises(
            UsageError, match=r"register_external_parameter\(User, .*\(2,\) belongs to no module"
        ):
            start(3, model=model, param_persistence_threshold=0)
        unregister(model.user, stranger)
    engine = start(3, model=model, param_persistence_threshold=0, max_reuse_distance=0)
    if not early:
        with pytest.raises(RuntimeError):
            engine(torch.ones(4, D))
        with pytest.raises(
            UsageError, match=r"\(2,\) belongs to no module that was given to initialize"
        ):
            register(model.user, stranger)
        if by_context:
            with ds_zero.GatheredParameters(weight, fwd_module=model.user):
                pass
        else:
            register(model.user, weight)
    torch.manual_seed(0)
    plain = Outside()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(2):
        step(engine, seed)
        unused_are_sharded(engine)
        for rank in range(comm.world_size()):
            x = torch.randn(4, D, generator=torch.Generator().manual_seed(10 * seed + rank))
            (plain(x).square().mean() / comm.world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = weights(engine)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach().double(), rtol=1e-6, atol=1e-6)
    unregister(model.user, weight)
    with pytest.raises(RuntimeError):
        engine(torch.ones(4, D))
    with pytest.raises(UsageError, match="was not registered with this User"):
        unregister(model.user, weight)
    with pytest.raises(UsageError, match="the first argument must be a module, not int"):
        register(3, weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the second argument must be an nn.Parameter, not Tensor"):
        register(model.user, torch.ones(2))  # type: ignore[arg-type]
    engine.destroy()


@pytest.mark.parametrize(("early", "by_context"), [(True, False), (False, False), (False, True)])
def test_external_parameters(early: bool, by_context: bool) -> None:
    run_ranks(2, check_external, early, by_context)


class Wrapper(nn.Module):
    """What adapters do: put a module in another's place, and take its weight over."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.extra = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight) * self.extra


def check_late() -> None:
    records: list[str] = []
    logger = logging.getLogger("ds_zero")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine = start(3, max_reuse_distance=0)
    step(engine)
    module = engine.module
    module.a = Wrapper(module.a.weight)
    before = weights(engine)
    for _ in range(2):
        step(engine, 1)
        unused_are_sharded(engine)
    after = weights(engine)
    assert not torch.equal(before["a.weight"], after["a.weight"])
    assert torch.equal(module.a.extra, torch.ones(D))
    assert [r for r in records if "added to the model after initialize" in r] == [
        "parameters added to the model after initialize are not trained, and each rank has its "
        "own: a.extra; "
        "add modules before initialize to train them"
    ]
    logger.removeHandler(handler)
    engine.destroy()
    assert module.a.weight.shape == (D, D)


def test_modules_attached_late() -> None:
    run_ranks(2, check_late)


def check_generation(stage: int) -> None:
    engine = start(stage)
    step(engine)
    module = engine.module
    with torch.no_grad():
        truth = module.eval()(torch.ones(4, D))
    hooks = len(module.a._forward_pre_hooks)
    for given in (engine, module):
        with ds_zero.unwrap_model_for_generation(given) as unwrapped:
            assert unwrapped is module
            assert not module.a._forward_pre_hooks and not torch.is_grad_enabled()
            for _ in range(3):
                assert torch.equal(unwrapped(torch.ones(4, D)), truth)
        unused_are_sharded(engine)
        assert len(module.a._forward_pre_hooks) == hooks
    module.train()
    before = weights(engine)
    step(engine)
    unused_are_sharded(engine)
    assert not torch.equal(before["a.weight"], weights(engine)["a.weight"])
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_generation(stage: int) -> None:
    run_ranks(2, check_generation, stage)
