"""Experts that are themselves sharded over ``tp``: axes of parameters, and checkpoints at any size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import moe_models as m
from ds_moe import MoE
from ds_testing import run_ranks
from ds_testing.truth import relative, whole_weights
from test_moe_conformance import zero


def held(cut: bool) -> list[Any]:
    """The axes of an expert's and the gate's parameters, beside a tp axis."""
    import ds_core

    model = MoE(m.HIDDEN, m.expert(), m.NUM, ep_size=2, enable_expert_tensor_parallelism=cut)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "fake_axes": {"axes": {"tp": 2}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    engine = ds_core.initialize(model=model, config=config)[0]
    found = {info.name: list(info.held) for info in engine.ctx.params.values()}
    engine.destroy()
    return [found["experts.stacked.0.weight"], found["gate.wg.weight"]]


@pytest.mark.slow
def test_experts_that_are_cut_over_tp_differ_over_it() -> None:
    assert run_ranks(4, held, True) == [[["ep", "tp"], []]] * 4
    assert run_ranks(4, held, False) == [[["ep"], []]] * 4


TP = {"plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]}}


class FromAll(torch.autograd.Function):
    """The sum over tensor-parallel ranks, forward; as it is, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        from ds_core import comm

        x = x.clone()
        comm.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ToAll(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return FromAll.forward(ctx, grad, ctx.group), None


class CutExpert(nn.Module):
    """A feed-forward network of which tensor-parallel ranks hold columns of the one and rows of the
    other weight.
    """

    mesh: Any = None

    def __init__(self, index: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        one = torch.randn(12, m.HIDDEN)
        two = torch.randn(m.HIDDEN, 12)
        wide = 12 // size
        self.one = nn.Parameter(one[index * wide : (index + 1) * wide].clone())
        self.two = nn.Parameter(two[:, index * wide : (index + 1) * wide].clone())
        self.bias = nn.Parameter(torch.randn(m.HIDDEN))
        self.one.partition_dim = 0
        self.two.partition_dim = 1
        self.bias.partition_dim = -1

    def forward(self, x: Tensor) -> Tensor:
        group = CutExpert.mesh.group("tp")
        inner = torch.tanh(ToAll.apply(x, group) @ self.one.t())
        return FromAll.apply(inner @ self.two.t(), group) + self.bias


def tensor_parallel(ep: int, tp: int, stage: int, folder: str, first: bool) -> dict[str, Tensor]:
    """Two steps, a checkpoint between them; the rank's whole weights after what it did."""
    import ds_core
    from ds_core import comm

    expert = CutExpert(comm.rank() % tp, tp)
    torch.manual_seed(3)
    layer = MoE(
        m.HIDDEN,
        expert,
        m.NUM,
        ep,
        k=2,
        enable_expert_tensor_parallelism=True,
        drop_tokens=False,
        **m.QUIET,
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "fake_axes": {"axes": {"tp": tp}},
        **TP,
    }
    engine = ds_core.initialize(model=layer.double(), config={**config, **zero(stage)})[0]
    CutExpert.mesh = engine.ctx.mesh
    if not first:
        engine.load_checkpoint(folder)
    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    for _ in range(1):
        torch.manual_seed(50 + engine.global_steps)
        x = torch.randn(16, m.HIDDEN, dtype=torch.float64)[
            index * 16 // dp : (index + 1) * 16 // dp
        ]
        out, _, _ = engine(x)
        engine.backward((out * out).mean())
        engine.step()
    if first:
        engine.save_checkpoint(folder)
    whole = whole_weights(engine)
    engine.destroy()
    return whole


@pytest.mark.fast_cases("2-2-2")
@pytest.mark.parametrize(("ep", "tp", "stage"), [(1, 2, 0), (2, 2, 2)])
def test_checkpoints_of_experts_cut_over_tp_load_at_any_size(
    ep: int, tp: int, stage: int, tmp_path: Path
) -> None:
    truth = run_ranks(1, tensor_parallel, 1, 1, 0, str(tmp_path / "alone"), True)[0]
    after = run_ranks(1, tensor_parallel, 1, 1, 0, str(tmp_path / "alone"), False)[0]
    saved = run_ranks(ep * tp, tensor_parallel, ep, tp, stage, str(tmp_path / "cut"), True)
    runs = [(1, 1, 1, 0), (2, 1, 2, 3), (4, 2, 2, 1), (4, 4, 1, 0)]
    resumed = [
        (w, e, t, run_ranks(w, tensor_parallel, e, t, z, str(tmp_path / "cut"), False))
        for w, e, t, z in runs
    ]
    for what, ranks, right in [("saved", saved, truth), *((r[:3], r[3], after) for r in resumed)]:
        for rank, whole in enumerate(ranks):
            for name, value in right.items():
                assert relative(whole[name], value) < 1e-9, f"{what}, rank {rank}: {name}"


def test_weights_in_stripes_do_not_tell_how_they_are_cut() -> None:
    from ds_moe.experts import partition_dim

    weight = nn.Parameter(torch.ones(4, 2))
    assert partition_dim(weight) is None
    weight.partition_dim = 0  # type: ignore[attr-defined]
    assert partition_dim(weight) == 0
    weight.partition_stride = 2  # type: ignore[attr-defined]
    assert partition_dim(weight) is None
