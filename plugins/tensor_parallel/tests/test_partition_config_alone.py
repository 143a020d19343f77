"""Rules of the user's: what they do to a model of one's own, and what they are refused for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ds_tensor_parallel.config import TensorParallelConfig
from ds_tensor_parallel.planning.division import Division
from ds_tensor_parallel.planning.plan import make_plan
from ds_tensor_parallel.planning.rules import Kind
from ds_testing import run_ranks
from pydantic import ValidationError
from torch import Tensor, nn

from ds_core.errors import ConfigError

WIDTH = 6
INNER = 10


class Own(nn.Module):
    """Queries, wider than keys and values, in one weight; a number that all parts use; a gate and
    values in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, WIDTH)
        self.mixing = nn.Linear(WIDTH, 8 + 4 + 4)
        self.scale = nn.Linear(1, 1, bias=False)  # of one number for all parts
        self.joining = nn.Linear(4, WIDTH)
        self.gated = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.lowered = nn.Linear(INNER, WIDTH)
        self.answer = nn.Linear(WIDTH, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        width = self.mixing.out_features // 4
        q, k, v = self.mixing(x).split([2 * width, width, width], -1)
        q = q.unflatten(-1, (-1, 2)).sum(-1)
        x = x + self.joining((self.scale.weight * q * k).tanh() + v)
        gate, value = self.gated(x).chunk(2, -1)
        logits = self.answer(x + self.lowered(gate.sigmoid() * value))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


SPECS: list[dict[str, Any]] = [
    {"patterns": [r"mixing\.weight"], "shape": [[8, 4, 4], -1], "partition_dim": 0},
    {"patterns": [r"joining\.weight", r"lowered\."], "partition_type": "row"},
    {"patterns": [r"scale\.weight"], "partition_type": "skip", "grad_allreduce": True},
    {"patterns": [r".*gated"], "shape": [2, -1]},
    {"patterns": [r"answer\.weight"], "gather_output": True},
    {"patterns": [r"words"], "partition_dim": 0, "model_types": ["another"]},
]


def config(specs: list[dict[str, Any]], **rules: Any) -> dict[str, Any]:
    return {
        "autotp_size": 2,
        "partition_config": {"use_default_specs": False, "layer_specs": specs, **rules},
    }


def own() -> nn.Module:
    torch.manual_seed(3)
    return Own().double()


def ids(step: int) -> Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(step))


def errors() -> dict[str, float]:
    from ds_run_state.slices import SLICES

    import ds_core

    truth = own()
    off = {}
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.3)
    keys = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.3}}}
    engine, *_ = ds_core.initialize(
        model=own(), config={**keys, **sgd, "tensor_parallel": config(SPECS)}
    )
    for step in range(3):
        loss = engine(ids(step))
        wanted = truth(ids(step))
        engine.backward(loss)
        engine.step()
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        off[f"loss {step}"] = abs(loss.item() - wanted.item())
    slices = engine.ctx.stash[SLICES]
    for name, param in engine.module.named_parameters():
        full = truth.get_parameter(name).detach()
        off[name] = float(
            (param - (slices[name].take(full) if name in slices else full)).detach().abs().max()
        )
    assert set(slices) == {
        *("mixing.weight", "mixing.bias", "joining.weight", "lowered.weight", "gated.weight"),
        *("answer.weight", "answer.bias"),
    }
    return off


def test_rules_divide_a_model_of_ones_own() -> None:
    for off in run_ranks(2, errors):
        assert max(off.values()) < 1e-12, off


OTHERS: list[dict[str, Any]] = [
    {"patterns": ["decoder"]},
    {"patterns": [r"gate$"], "partition_type": "skip"},
]


def for_several_models() -> list[str]:
    """One list of specs may serve several models; one of which nothing is for this model divides
    nothing.
    """
    import ds_core
    from ds_core import comm

    said: list[str] = []
    watch = logging.Handler(logging.WARNING)
    watch.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_tensor_parallel").addHandler(watch)
    section = config([*SPECS, *OTHERS])
    engine, *_ = ds_core.initialize(
        model=own(), config={"train_micro_batch_size_per_gpu": 2, "tensor_parallel": section}
    )
    assert abs(engine(ids(0)).item() - own()(ids(0)).item()) < 1e-12
    engine.destroy()
    with pytest.raises(ConfigError, match="no layer of Own can be divided"):
        ds_core.initialize(
            model=own(),
            config={"train_micro_batch_size_per_gpu": 2, "tensor_parallel": config(OTHERS)},
        )
    return said if comm.rank() == 0 else []


def test_rules_for_other_models_are_passed_over_and_named() -> None:
    said = run_ranks(2, for_several_models)[0]
    assert len(said) == 2
    assert "layer_specs.6.patterns: ['decoder'] match no parameter" in said[0]
    assert "layer_specs.7.patterns: ['gate$'] match no parameter" in said[1]


def sharded_before() -> str:
    import ds_core
    from ds_core.errors import UsageError

    model = own()
    model.gated.weight.data = torch.empty(0, dtype=torch.float64)
    with pytest.raises(UsageError) as error:
        ds_core.initialize(
            model=model,
            config={"train_micro_batch_size_per_gpu": 2, "tensor_parallel": config(SPECS)},
        )
    return str(error.value)


def test_weights_that_are_elsewhere_are_an_error() -> None:
    assert (
        "gated.weight has no elements here, and tensor parallelism cuts full weights"
        in run_ranks(2, sharded_before)[0]
    )


def plan(model: nn.Module, section: dict[str, Any], ranks: int = 2) -> Any:
    return make_plan(model, TensorParallelConfig.model_validate(section), ranks, "ds.json")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "not all": (
        config([SPECS[0]], strict_mode=True),
        r"strict_mode: linear layers without a rule: answer, gated, .*; add layer_specs",
    ),
    "lengths": (
        config([{"patterns": ["mixing"], "shape": [[8, 4], -1]}]),
        "mixing .*add up to 12, not to 16",
    ),
    "matrices": (
        config([{"patterns": ["mixing"], "shape": [3, -1]}]),
        "16 does not divide into 3 equal matrices",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_rules_that_do_not_fit_are_errors(case: str) -> None:
    section, why = WRONG[case]
    with pytest.raises(ConfigError, match=why):
        plan(own(), section)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"patterns": []}, "is empty"),
        ({"patterns": ["("]}, "no regular expression"),
        ({"patterns": ["a"], "partition_type": "rows"}, "row"),
        (
            {"patterns": ["a"], "shape": [2, -1], "partition_dim": 2},
            "partition_dim 2 is outside shape",
        ),
        ({"patterns": ["a"], "shape": [[1, [2]], -1]}, "int"),
        (
            {"patterns": ["a"], "shape": [[1, 2], -1], "partition_dim": 1},
            "belongs at partition_dim 1",
        ),
        ({"patterns": ["a"], "shape": [0, -1]}, "at least 1, or -1"),
        (
            {"patterns": ["a"], "partition_type": "row", "gather_output": True},
            "gather_output is for column",
        ),
        ({"patterns": ["a"], "grad_allreduce": True}, "grad_allreduce is for skip"),
    ],
)
def test_a_wrong_rule_is_named(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TensorParallelConfig.model_validate(config([section]))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (
            {"autotp_size": 2, "tensor_parallel": {"tp_size": 4}},
            "autotp_size is 2, and tensor_parallel.tp_size 4",
        ),
        ({"autotp_size": 2, "preset_model": "lama"}, "did you mean 'llama'"),
        ({"autotp_size": 2, "kernel_inject": True}, "inference engines"),
        ({"autotp_size": 2, "tp": {"mpu": 3}}, "None"),
    ],
)
def test_a_wrong_section_is_named(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TensorParallelConfig.model_validate(section)


def test_the_first_rule_counts_and_sizes_agree() -> None:
    section = config(
        [
            {"patterns": ["gated"], "partition_type": "skip"},
            {"patterns": ["(?!scale)"], "partition_type": "row"},
        ]
    )
    found = plan(own(), section)
    assert found.rules["gated"].kind is Kind.WHOLE and found.rules["lowered"].kind is Kind.ROW
    assert TensorParallelConfig.model_validate({"tp": {"tp_size": 4}}).size == 4


def test_heuristics_find_pairs() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4)),
        nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 4)),  # a norm needs all 16
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),  # not wide inside
    )
    kinds = {name: rule.kind for name, rule in plan(model, {"autotp_size": 2}).rules.items()}
    assert kinds == {"0.0": Kind.COLUMN, "0.3": Kind.ROW}


def test_lengths_are_cut_at_grains() -> None:
    section = {"autotp_size": 3, "tensor_parallel": {"tp_grain_size": 4}}
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 30), nn.GELU(), nn.Linear(30, 4)))
    assert plan(model, section, 3).divisions["0.0"].sizes() == [12, 12, 6]
    with pytest.raises(ConfigError, match="a length of 30 does not reach for 9 ranks"):
        plan(model, section, 9)


def test_divisions() -> None:
    fused = Division.by_count((8, 4, 4), 4, 3)
    assert [fused.ranges(rank) for rank in range(3)] == [
        [(0, 4), (8, 2), (12, 2)],
        [(4, 2), (10, 1), (14, 1)],
        [(6, 2), (11, 1), (15, 1)],
    ]
    assert fused.sizes() == [8, 4, 4]
    order = fused.order()
    whole = torch.arange(16)
    given = torch.cat(
        [whole[first : first + size] for rank in range(3) for first, size in fused.ranges(rank)]
    )
    assert order is not None
    assert torch.equal(torch.cat([given[first : first + size] for first, size in order]), whole)
    with pytest.raises(ValueError, match="6 does not divide into 4 heads"):
        Division.by_count((8, 6), 4, 2)
