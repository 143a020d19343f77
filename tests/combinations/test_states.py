"""States of parameters that are cut: reading and setting single ones, and the whole model on one
rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import models as m
from ds_testing import run_ranks


def engine(stage: int, **more: Any) -> Any:
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": m.MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "tensor_parallel": {"autotp_size": 2},
        **more,
    }
    made, *_ = ds_core.initialize(model=m.whole().double(), config=config)
    return made


def read_and_set(stage: int) -> dict[str, float]:
    import torch
    from ds_access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )
    from ds_run_state.slices import SLICES
    from ds_testing.truth import relative

    made = engine(stage)
    truth = m.whole().double()
    slices = made.ctx.stash[SLICES]
    mesh = made.ctx.mesh
    made.backward(made(**m.batch(0, 0, mesh.index("dp"))))
    for index in range(mesh.size("dp")):
        (truth(**m.batch(0, 0, index)) / mesh.size("dp")).backward()
    off: dict[str, float] = {}
    params = dict(made.module.named_parameters())
    wholes = dict(truth.named_parameters())
    assert any(name in slices for name in params)

    def mine(name: str, whole: torch.Tensor) -> torch.Tensor:
        return slices[name].take(whole) if name in slices else whole

    for name, param in params.items():
        off[f"grad {name}"] = relative(safe_get_full_grad(param), mine(name, wholes[name].grad))
        off[f"param {name}"] = relative(
            safe_get_full_fp32_param(param), mine(name, wholes[name].detach())
        )
    made.step()
    torch.optim.Adam(wholes.values(), lr=0.01).step()
    for name, param in params.items():
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        off[f"moment {name}"] = relative(moment, mine(name, 0.1 * wholes[name].grad))
        doubled = 2 * safe_get_full_fp32_param(param)
        safe_set_full_fp32_param(param, doubled)
        safe_set_full_optimizer_state(param, 3 * moment, "exp_avg")
        off[f"set {name}"] = relative(
            safe_get_full_fp32_param(param), mine(name, 2 * wholes[name].detach())
        )
        off[f"set moment {name}"] = relative(
            safe_get_full_optimizer_state(param, "exp_avg"), 3 * moment
        )
    made.destroy()
    return off


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3],
)
def test_states_of_a_rank_are_its_parts(stage: int) -> None:
    """Gradients, masters and moments are read and set as this rank's part of the whole, at every
    stage.
    """
    for rank, off in enumerate(run_ranks(4, read_and_set, stage)):
        worst = max(off, key=lambda name: off[name])
        assert off[worst] <= 1e-7, f"rank {rank}: {worst} is off by {off[worst]:.3g}"


def gathered(stage: int) -> list[Any]:
    import torch
    from ds_testing.truth import relative

    made = engine(stage, sequence_parallel={"size": 2, "inputs": m.INPUTS})
    made.backward(made(**m.batch(0, 0, 0)))
    made.step()
    state = made._consolidated_16bit_state_dict()
    made.destroy()
    if state is None:
        return [None, None]
    truth = m.whole().double()
    truth.load_state_dict(state)
    plain = m.whole().double()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    plain(**m.batch(0, 0, 0)).backward()
    optimizer.step()
    found = dict(truth.named_parameters())
    wanted = dict(plain.named_parameters())
    return [
        sorted(state) == sorted(plain.state_dict()),
        max(relative(found[n], wanted[n]) for n in wanted),
    ]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_whole_state_dict_on_rank_0(stage: int) -> None:
    """What Accelerate asks of an engine with tensor parallelism, when a model is saved."""
    (named, off), *others = run_ranks(4, gathered, stage)
    assert named and off <= 1e-7
    assert others == [[None, None]] * 3


def summed(stage: int) -> float:
    """Two ranks divide each sequence, two have other samples: how far weights are from those of
    summed gradients.
    """
    import torch
    from ds_testing.truth import relative, whole_weights

    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": m.MICRO,
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "sum",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "sequence_parallel": {"size": 2, "inputs": m.INPUTS},
    }
    made, *_ = ds_core.initialize(model=m.whole().double(), config=config)
    made.backward(made(**m.batch(0, 0, made.ctx.mesh.index("batch"))))
    made.step()
    found = whole_weights(made)
    plain = m.whole().double()
    made.destroy()
    for index in range(2):
        plain(**m.batch(0, 0, index)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return max(relative(found[name], param.detach()) for name, param in plain.named_parameters())


@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3))]
)
def test_a_sum_of_gradients_is_over_samples_and_not_over_parts_of_a_sequence(stage: int) -> None:
    assert max(run_ranks(4, summed, stage)) <= 1e-12
