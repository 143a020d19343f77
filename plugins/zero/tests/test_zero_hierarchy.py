"""Blocks of ranks, hpZ and MiCS: the weights of plain stage 3 to the last bit, and what crosses
between blocks.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D = 8
HPZ = {"zero_hpz_partition_size": 2}
MICS = {"mics_shard_size": 2}
SMALL = {"param_persistence_threshold": 10, "reduce_bucket_size": 300, "max_reuse_distance": 0}


class Net(nn.Module):
    """Recomputed, shared, frozen and small weights, and one module that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.out = nn.Linear(D, D, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(2)
        )
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.unused = nn.Linear(D, D)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        loss: Tensor = self.out(torch.tanh(self.frozen(x))).square().mean()
        return loss


def train(
    zero: dict[str, Any], extra: dict[str, Any], *, exact: bool = False, steps: int = 3
) -> dict[str, Tensor]:
    """Losses, weights and moments after some steps. exact: gradients are rounded, so that every sum
    is exact.
    """
    from ds_testing.kits.train.partitioner import whole_weights

    import ds_core
    from ds_core import comm

    torch.manual_seed(comm.rank())
    model = Net().double() if exact else Net()
    if exact:
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: (grad * 2**24).round() / 2**24)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        **extra,
        "zero_optimization": {"stage": 3, **SMALL, **zero},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    found = {}
    for step in range(steps * config.get("gradient_accumulation_steps", 1)):
        torch.manual_seed(100 * step + comm.rank())
        x = torch.randn(2, D, dtype=next(iter(model.buffers()), torch.empty(0)).dtype)
        loss = engine(x.to(engine.module.inp.weight.dtype))
        engine.backward(loss)
        engine.step()
        found[f"loss {step}"] = loss.detach()
    with torch.no_grad():
        found["evaluated"] = engine(torch.ones(2, D).to(engine.module.inp.weight.dtype))
    found |= whole_weights(engine)
    engine.destroy()
    return found


def differences(
    variants: list[dict[str, Any]],
    extra: dict[str, Any],
    exact: bool,
    plain: dict[str, Any] | None = None,
) -> list[dict[str, float]]:
    """Per variant, where it differs from plain stage 3 (with the keys of `plain`), relative to the
    largest value.
    """
    truth = train(plain or {}, extra, exact=exact)
    answers = []
    for variant in variants:
        found = train(variant, extra, exact=exact)
        assert found.keys() == truth.keys()
        other = {k: v for k, v in truth.items() if not torch.equal(found[k], v)}
        answers.append(
            {k: float((found[k] - v).abs().max() / v.abs().max()) for k, v in other.items()}
        )
    return answers


# MiCS ends shards elsewhere than plain stage 3 does, and torch's fused Adam rounds what is left
# over at the end of a tensor otherwise than what it does in vectors. Single operations round all
# elements alike. Without bias correction torch's fused Adam does not serve, and in fp64 the update
# is made of those.
SINGLE_OPERATIONS = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1, "bias_correction": False},
    }
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "bf16": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "matrices": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
}


@pytest.mark.parametrize(
    "run", ["bf16", *(pytest.param(r, marks=pytest.mark.slow) for r in RUNS if r != "bf16")]
)
def test_second_copies_change_no_bit(run: str) -> None:
    variants = [
        HPZ,
        {**HPZ, "offload_param": {"device": "cpu"}},
        {**HPZ, "use_all_reduce_for_fetch_params": True},
    ]
    for answer in run_ranks(4, differences, variants, RUNS[run], False):
        assert answer == [{}] * len(variants)


@pytest.mark.parametrize("run", ["plain", pytest.param("accumulated", marks=pytest.mark.slow)])
def test_shard_groups_change_no_bit_where_sums_are_exact(run: str) -> None:
    extra = {k: v for k, v in RUNS[run].items() if k != "gradient_clipping"} | SINGLE_OPERATIONS
    variants = [
        MICS,
        {"mics_shard_size": 1},
        {"mics_shard_size": 4},
        {**MICS, "reduce_scatter": False},
    ]
    variants.append(
        {**MICS, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    )
    for answer in run_ranks(4, differences, variants, extra, True):
        assert answer == [{}] * len(variants)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_shard_groups_train_as_plain_stage_3(run: str) -> None:
    """In any case sums over ranks are made in another order only.

    Muon's iterations make that larger.
    """
    bound = {"bf16": 0.05, "autocast": 0.05, "matrices": 1e-4}.get(run, 1e-5)
    for answer in run_ranks(4, differences, [MICS], RUNS[run], False):
        assert all(value < bound for value in answer[0].values()), answer


# -- what crosses between blocks -------------------------------------------------------------------


def crossings(zero: dict[str, Any], extra: dict[str, Any]) -> dict[str, list[str]]:
    """Per phase of two micro-batches and a step, the messages of groups that are in several blocks
    of two ranks.
    """
    import ds_core
    from ds_core import comm

    class Watch(comm.Interceptor):
        """Notes them under the phase that runs."""

        def __init__(self) -> None:
            self.phase = ""
            self.seen = dict[str, list[str]]()

        def around(self, collective: comm.Collective, call: Any) -> Any:
            ranks = torch.distributed.get_process_group_ranks(collective.group)
            if len({rank // 2 for rank in ranks}) > 1 and collective.label.startswith(
                ("weights", "gradients")
            ):
                self.seen.setdefault(self.phase, []).append(
                    f"{collective.op} over {len(ranks)} {collective.label}"
                )
            return call()

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        **extra,
        "zero_optimization": {"stage": 3, **SMALL, "prefetch_bucket_size": 0, **zero},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    comm.add_interceptor(watch := Watch())
    for _ in range(2):
        watch.seen.clear()
        for micro in range(2):
            watch.phase = f"forward {micro}"
            loss = engine(torch.ones(2, D))
            watch.phase = f"backward {micro}"
            engine.backward(loss)
            watch.phase = "step"
            engine.step()
    comm.remove_interceptor(watch)
    engine.destroy()
    return watch.seen


def test_what_crosses_between_blocks() -> None:
    for seen in run_ranks(4, crossings, HPZ, {}):
        gathers = {phase: [m for m in found if "gather" in m] for phase, found in seen.items()}
        assert len(gathers["forward 0"]) == len(set(gathers["forward 0"])) > 4  # each weight once
        # those came with the first pass of all
        assert not any("frozen" in m for m in gathers["forward 0"])
        assert not any(gathers.get(phase) for phase in ("backward 0", "forward 1", "backward 1"))
        assert all("small" in m or "gain" in m or "bias" in m for m in gathers.get("step", []))
    for seen in run_ranks(4, crossings, MICS, {}):
        assert set(seen) == {"backward 0", "backward 1"}
        assert {m.split()[0] for found in seen.values() for m in found} == {"all_reduce"}


def on_two_hosts(zero: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """As if ranks 0 and 1 were on another host than 2 and 3: differences to plain stage 3, and what
    crosses.
    """
    from ds_core import comm

    with mock.patch("ds_zero.comm.hierarchy.host_name", return_value=f"host {comm.rank() // 2}"):
        (found,) = differences([zero], {"bf16": {"enabled": True}, "gradient_clipping": 0.1}, False)
        return found, crossings(zero, {})


def test_shards_cross_once_where_groups_are_on_several_hosts() -> None:
    zero = {"mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    plain = run_ranks(4, crossings, {"mics_shard_size": 4}, {})[0]
    for found, seen in run_ranks(4, on_two_hosts, zero):
        assert found == {}
        for phase in ("forward 0", "backward 0"):
            whole = [m for m in plain[phase] if "weights" in m]
            assert (
                [m for m in seen[phase] if "weights" in m]
                == [m.replace("over 4", "over 2") for m in whole]
                != []
            )


# -- access and construction -----------------------------------------------------------------------


def look(zero: dict[str, Any]) -> dict[str, float]:
    """Weights that were written in every way are what forwards use, on all ranks; gradients are
    those of all ranks.
    """
    import ds_access
    import ds_zero

    import ds_core
    from ds_core import comm
    from ds_core.errors import UsageError

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {
            "stage": 3,
            "param_persistence_threshold": 0,
            "enable_sanity_checks": True,
            **zero,
        },
    }
    engine, *_ = ds_core.initialize(model=nn.Linear(D, D, bias=False), config=config)
    weight = engine.module.weight
    x = torch.eye(D) * (1 + comm.rank())
    found = {}

    def forward(wanted: float) -> float:
        with torch.no_grad():
            return float((engine(torch.eye(D)) - wanted).abs().max())

    with ds_zero.GatheredParameters(weight, modifier_rank=3):
        weight.data.fill_(float(comm.rank()))
    found["written"] = forward(3.0)
    ds_access.safe_set_full_fp32_param(weight, torch.full((D, D), 5.0))
    found["set"] = forward(5.0)
    # each owner's counts
    ds_access.safe_set_full_fp32_param(weight, torch.full((D, D), 7.0 + comm.rank()))
    value = ds_access.safe_get_full_fp32_param(weight)
    assert value is not None
    with torch.no_grad():
        found["set apart"] = float((engine(torch.eye(D)) - value.T).abs().max())
    engine.backward(engine(x).sum())
    grad = ds_access.safe_get_full_grad(weight)
    assert grad is not None
    found["gradient"] = float((grad - 2.5 / 2).abs().max())
    piece = ds_access.safe_get_local_fp32_param(weight)
    assert piece is not None
    try:
        ds_access.safe_set_local_fp32_param(weight, torch.zeros_like(piece))
    except UsageError as error:
        assert "zero_hpz_partition_size" in zero and "under hpZ other ranks do not see" in str(
            error
        )
    engine.step()
    engine.backward(engine(x).sum())
    engine.step()
    ds_access.safe_set_local_fp32_param(weight, torch.full_like(piece, 2.0))
    found["local"] = forward(2.0)
    engine.destroy()
    return found


@pytest.mark.parametrize("zero", [HPZ, MICS], ids=["hpZ", "MiCS"])
def test_weights_that_are_written_are_used(zero: dict[str, Any]) -> None:
    for answer in run_ranks(4, look, zero):
        assert all(error == 0 for error in answer.values()), answer


def build(zero: dict[str, Any]) -> list[float]:
    """A model built under MiCS_Init on each block, against plain construction on rank 0."""
    import ds_zero
    from ds_testing.kits.train.partitioner import whole_weights

    import ds_core
    from ds_core import comm

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0, **MICS, **zero},
    }
    torch.manual_seed(comm.rank())
    with ds_zero.MiCS_Init(config_dict_or_path=config):
        model = Net()
    assert model.inp.weight.ds_tensor.numel() == D * D // 2
    torch.manual_seed(0)
    truth = dict(Net().named_parameters())
    engine, *_ = ds_core.initialize(model=model, config=config)
    whole = whole_weights(engine)
    engine.destroy()
    return [float((whole[n].view_as(p) - p).abs().max()) for n, p in truth.items() if n in whole]


@pytest.mark.parametrize(
    "offloads",
    [(), pytest.param(("offload_param", "offload_optimizer"), marks=pytest.mark.slow)],
    ids=["", "offload"],
)
def test_models_are_built_in_shard_groups(offloads: tuple[str, ...]) -> None:
    for errors in run_ranks(4, build, {key: {"device": "cpu"} for key in offloads}):
        assert len(errors) >= 12 and not any(errors)


# -- checkpoints -----------------------------------------------------------------------------------


def keep(folder: str, zero: dict[str, Any], load: str, tag: str) -> None:
    """Train a step, or load; and save."""
    import ds_core
    from ds_core import comm

    torch.manual_seed(comm.rank())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, **SMALL, **zero},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    if load:
        engine.load_checkpoint(folder, tag=load)
    else:
        engine.backward(engine(torch.ones(2, D, dtype=torch.bfloat16)))
        engine.step()
    engine.save_checkpoint(folder, tag=tag)
    engine.destroy()


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, HPZ),
    (1, {}),
    (4, {"mics_shard_size": 4}),
    (2, MICS),
    (4, {}),
]


@pytest.mark.parametrize(
    ("zero", "layouts"),
    [
        (MICS, LAYOUTS[:1]),
        pytest.param(MICS, LAYOUTS, marks=pytest.mark.slow),
        pytest.param(HPZ, [(4, MICS), (2, {})], marks=pytest.mark.slow),
    ],
)
def test_checkpoints_load_at_other_sizes(
    zero: dict[str, Any], layouts: list[tuple[int, dict[str, Any]]], tmp_path: Any
) -> None:
    from ds_checkpoint.offline import differences as differing
    from ds_checkpoint.offline import open_saved

    run_ranks(4, keep, str(tmp_path), zero, "", "from")
    with open_saved(tmp_path, "from") as first:
        for place, (world, other) in enumerate(layouts):
            run_ranks(world, keep, str(tmp_path), other, "from", f"to{place}")
            with open_saved(tmp_path, f"to{place}") as second:
                assert list(differing(first, second)) == [], (world, other)


# -- errors ----------------------------------------------------------------------------------------


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stage": 2, **MICS}, "mics_shard_size: only stage 3 partitions weights, this is stage 2"),
    (
        {"stage": 1, **HPZ},
        "zero_hpz_partition_size: only stage 3 partitions weights, this is stage 1",
    ),
    ({"stage": 3, **HPZ, **MICS}, "MiCS gathers inside a shard group already"),
    (
        {"stage": 3, "mics_hierarchical_params_gather": True},
        "there are no shard groups to gather over",
    ),
    ({"stage": 3, "mics_shard_size": 3}, "mics 3 must divide dp 1 .* use 1"),
    ({"stage": 3, "zero_hpz_partition_size": 2}, "hpz 2 must divide dp 1 .* use 1"),
]


@pytest.mark.parametrize(("zero", "message"), WRONG)
def test_what_cannot_be(zero: dict[str, Any], message: str) -> None:
    import ds_core
    from ds_core.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        ds_core.initialize(
            model=nn.Linear(2, 2), config={"train_batch_size": 1, "zero_optimization": zero}
        )


def test_construction_in_shard_groups_needs_their_size() -> None:
    import ds_zero

    from ds_core.errors import UsageError

    with pytest.raises(UsageError, match="has no zero_optimization.mics_shard_size"):
        ds_zero.MiCS_Init(
            config_dict_or_path={"train_batch_size": 1, "zero_optimization": {"stage": 3}}
        )


# -- with everything else --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(8, 2), (8, 4)])
def test_eight_ranks(world: int, size: int) -> None:
    """hpZ: no bit differs.

    MiCS: only what the fused update rounds otherwise; see SINGLE_OPERATIONS.
    """
    hpz = {"zero_hpz_partition_size": size}
    mics = {"mics_shard_size": size}
    for answer in run_ranks(world, differences, [hpz], RUNS["accumulated"], False, timeout=600):
        assert answer == [{}]
    for answer in run_ranks(world, differences, [mics], SINGLE_OPERATIONS, True, timeout=600):
        assert answer == [{}]
    for found, nothing in run_ranks(world, differences, [mics, hpz], {}, True, timeout=600):
        assert all(value < 1e-12 for value in found.values()), found
        assert nothing == {}


@pytest.mark.slow
def test_weights_and_states_that_leave_memory(tmp_path: Any) -> None:
    """With second copies a shard is read once a step."""
    places = {
        f"offload_{what}": {"device": "nvme", "nvme_path": str(tmp_path)}
        for what in ("param", "optimizer")
    }
    for answer in run_ranks(4, differences, [{**HPZ, **places}], RUNS["bf16"], False, places):
        assert answer == [{}]
    for answer in run_ranks(4, differences, [{**MICS, **places}], SINGLE_OPERATIONS, True, places):
        assert answer == [{}]


def export(folder: str, zero: dict[str, Any]) -> None:
    """Save the model for others, of weights that are the same on every rank."""
    import ds_core

    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, **SMALL, **zero},
    }
    engine, *_ = ds_core.initialize(model=Net(), config=config)
    engine(torch.ones(2, D))
    assert engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [HPZ, MICS], ids=["hpZ", "MiCS"])
def test_models_are_exported(zero: dict[str, Any], tmp_path: Any) -> None:
    from safetensors.torch import load_file

    run_ranks(4, export, str(tmp_path), zero)
    torch.manual_seed(0)
    (file,) = tmp_path.rglob("*.safetensors")
    found = load_file(file)
    for name, value in Net().state_dict().items():
        assert name == "out.weight" or torch.equal(found[name], value.to(found[name].dtype)), name


# -- with quantised messages -----------------------------------------------------------------------


def with_quantised(variants: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, float]]:
    """Of pairs of sections, where they differ and by how much."""
    answers = []
    for first, second in variants:
        one = train(first, {})
        two = train(second, {})
        answers.append(
            {
                k: float((two[k] - v).abs().max())
                for k, v in one.items()
                if not torch.equal(two[k], v)
            }
        )
    return answers


@pytest.mark.slow
def test_second_copies_hold_what_was_gathered() -> None:
    """So qwZ's weights are the same in both passes, whether they come from all ranks or from near
    ones.
    """
    qwz = {"zero_quantized_weights": True}
    qgz = {"zero_quantized_gradients": True}
    for answer in run_ranks(
        4, with_quantised, [(qwz, {**qwz, **HPZ}), ({**MICS, **qgz}, {**MICS, **qwz, **qgz})]
    ):
        assert answer[0] == {}
        assert 0 < max(answer[1].values()) < 0.5
