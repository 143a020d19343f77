"""Compressed layers as modules: names, parents that read weights, memory, copies, plain loops,
torch.compile.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_compression import init_compression, redundancy_clean, set_step
from ds_compression.layers.masks import Blocks, PerRow, largest
from ds_compression.layers.quantise import noise_for, quantise_rows
from ds_compression.schedule import bits_at, changes, kept_at, share_at
from torch import Tensor, nn

from ds_core.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
from compressed_runs import batch, config, loss_of, net  # noqa: E402


def weights(modules: list[str], target: int = 4, **shared: Any) -> dict[str, Any]:
    group = {"params": {"start_bits": target, "target_bits": target}, "modules": modules}
    return {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, **shared},
            "different_groups": {"g": group},
        }
    }


# -- formulas --------------------------------------------------------------------------------------


def test_levels_by_hand() -> None:
    rows = torch.tensor([[-1.0, 0.3, 0.5, 0.99], [0.0, 0.0, 0.0, 0.0]])
    # 3 bits, symmetric: scale 2 * 1 / 8 = 0.25, levels -4 to 3
    assert quantise_rows(rows, 3, True).tolist() == [[-1.0, 0.25, 0.5, 0.75], [0.0] * 4]
    # 2 bits: 0.7 * mean |x| = 0.488; the others' mean is 2.49 / 3
    assert quantise_rows(rows, 2, True)[0].tolist() == pytest.approx([-0.83, 0.0, 0.83, 0.83])
    assert quantise_rows(rows, 1, True)[0].tolist() == pytest.approx(
        [-0.6975, 0.6975, 0.6975, 0.6975]
    )
    # 2**3 levels of 3 - (-1) = 4: scale 0.5, zero -1, places 0 to 7
    asymmetric = quantise_rows(torch.tensor([[-1.0, 0.1, 0.4, 3.0]]), 3, False)
    assert asymmetric.tolist() == [[-1.0, 0.0, 0.5, 2.5]]
    assert quantise_rows(rows[1:], 3, False).tolist() == [[0.0] * 4]


def test_stochastic_rounding_is_right_on_average_and_reproducible() -> None:
    rows = torch.tensor([[1.0, 0.1]])
    mean = torch.stack(
        [quantise_rows(rows, 3, True, noise_for(rows, s)) for s in range(4000)]
    ).mean(0)
    assert mean[0, 1].item() == pytest.approx(0.1, abs=0.01)  # nearest would be 0
    assert torch.equal(noise_for(rows, 7), noise_for(rows, 7))


def test_masks() -> None:
    # ceil(1.2) = 2
    assert largest(torch.tensor([3.0, 1.0, 3.0, 2.0]), 0.3).tolist() == [True, False, True, False]
    assert int(largest(torch.rand(30), 0.1).sum()) == 3
    scores = torch.arange(16.0).view(4, 4)
    assert Blocks(2, 2).mask(scores, 0.5).tolist() == [[False] * 4] * 2 + [[True] * 4] * 2
    rows = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    assert PerRow(2, 4).mask(rows, 0.5).tolist() == [
        [True, False, True, False],
        [False, False, True, True],
    ]
    assert PerRow(2, 4).mask(rows, 0.75).sum(1).tolist() == [3, 3]
    assert not Blocks(4, 1).fits((6, 4)) and PerRow(2, 4).fits((6, 4))


def test_schedules() -> None:
    assert [bits_at(age, 8, 5, 2) for age in range(8)] == [8, 8, 7, 7, 6, 6, 5, 5]
    assert [share_at(age, 8, 7, 2, 0.4) for age in range(6)] == pytest.approx(
        [0.4, 0.8, 0.4, 0.8, 1.0, 1.0]
    )
    assert [s for s in range(12) if changes(s, 3, 10, 3)] == [3, 6, 9, 10]
    kept = [kept_at(s, 0, 9, 0.2) for s in range(12)]
    assert kept[8] > kept[9] == kept[11] == 0.2
    assert all(a >= b for a, b in itertools.pairwise(kept)) and kept[0] < 1


# -- modules ---------------------------------------------------------------------------------------


def test_names_and_classes() -> None:
    section = weights(["up"]) | {
        "row_pruning": {
            "shared_parameters": {"enabled": True, "method": "topk", "schedule_offset": 0},
            "different_groups": {"g": {"modules": ["up"]}},
        }
    }
    model = net()
    before = set(net().state_dict())
    init_compression(model, config(section))
    assert set(model.state_dict()) == before | {"up.row_mask_scores"}
    assert isinstance(model.up, nn.Linear) and isinstance(
        model._modules["up"]._parameters["weight"], nn.Parameter
    )
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batch(0)), model(batch(0)))
    with torch.no_grad():
        copied.up._parameters["weight"].zero_()  # type: ignore[union-attr]
    assert not torch.equal(copied(batch(0)), model(batch(0)))
    model.up.weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))
    assert not model.up.weight.any()
    with pytest.raises(RuntimeError, match=r"weight of up.*gone"):
        _break(model)


def _break(model: Any) -> None:
    """An AttributeError inside must not become the plain parameter."""

    class Broken:
        def __call__(self, weight: Tensor) -> Tensor:
            raise AttributeError("gone")

        bits = 1

    from ds_compression.layers.layer import compression_of

    found = compression_of(model.up)
    assert found is not None
    found.quantiser = Broken()  # type: ignore[assignment]
    model.up.weight  # noqa: B018


class Parent(nn.Module):
    """Reads its child's weight, as nn.MultiheadAttention does, and ties one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.embed(ids), self.out.weight)


def test_parents_and_tied_weights() -> None:
    model = Parent()
    init_compression(model, config(weights(["embed", "out"])))
    shared: Any = model.embed._parameters["weight"]
    assert model.out._parameters["weight"] is shared
    rows = quantise_rows(shared.detach(), 4, True)
    whole = quantise_rows(shared.detach().view(1, -1), 4, True).view(12, 8)
    assert torch.equal(model.embed.weight, rows)  # an embedding has a scale per row
    ids = torch.tensor([1, 5])
    assert torch.equal(model(ids), rows[ids] @ whole.t())
    model(ids).sum().backward()
    assert len(list(model.parameters())) == 1
    # which use different values of one weight
    redundancy_clean(model, config(weights(["embed", "out"])))
    assert torch.equal(model.embed.weight, rows) and torch.equal(model.out.weight, whole)
    attention = nn.MultiheadAttention(8, 2)
    init_compression(attention, config(weights(["out_proj"], 2)))
    x = torch.randn(3, 1, 8)
    plain_one = nn.MultiheadAttention(8, 2)
    plain_one.load_state_dict(attention.state_dict())
    with torch.no_grad():
        plain_one.out_proj.weight.copy_(attention.out_proj.weight)
    assert torch.allclose(attention(x, x, x)[0], plain_one(x, x, x)[0])


def test_backward_keeps_no_second_weight() -> None:
    """See [Note: memory]: what is alive between forward and backward, beside parameters and
    inputs."""
    kept: list[Tensor] = []
    model = nn.Linear(64, 64, bias=False)
    init_compression(nn.Sequential(model), config(weights(["0"])))
    x = torch.randn(2, 64, requires_grad=True)
    out = model(x)
    pointers = {t.untyped_storage().data_ptr() for t in (x, model._parameters["weight"])}  # type: ignore[union-attr]
    node: Any = out.grad_fn
    todo = [node]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved"):
                value = getattr(node, name)
                found = value if isinstance(value, tuple) else [value]
                kept += [
                    saved.data
                    for saved in found
                    if isinstance(getattr(saved, "data", None), Tensor)
                ]
        todo += [following for following, _ in node.next_functions]
    big = [
        t for t in kept if t.numel() == 64 * 64 and t.untyped_storage().data_ptr() not in pointers
    ]
    assert not big
    out.sum().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().sum(0).expand(2, 64))


def test_a_loop_without_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    section = {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "schedule_offset": 1, "quantize_verbose": True},
            "different_groups": {
                "g": {"params": {"start_bits": 6, "target_bits": 5}, "modules": ["up"]}
            },
        }
    }
    model = net()
    parameter = model.up.weight
    init_compression(model, config(section))
    assert model.up.weight is parameter  # not yet
    with caplog.at_level(logging.INFO, "ds_compression"):
        set_step(model, 1)
        assert torch.equal(
            model.up.weight, quantise_rows(parameter.detach().view(1, -1), 6, True).view(16, 8)
        )
        set_step(model, 2)
    assert (
        "step 1: weights of g have 6 bits" in caplog.text
        and "step 2: weights of g have 5 bits" in caplog.text
    )
    with pytest.raises(UsageError, match="not compressed"):
        set_step(net(), 0)


def test_static_ranges_wait_for_calibration() -> None:
    section = {
        "activation_quantization": {
            "shared_parameters": {
                "enabled": True,
                "schedule_offset": 0,
                "range_calibration": "static",
            },
            "different_groups": {"g": {"params": {"bits": 4}, "modules": ["up"]}},
        }
    }
    model = net()
    plain = net()
    init_compression(model, config(section))
    assert torch.equal(model(batch(0)), plain(batch(0)))
    model.up.activation_range.copy_(torch.tensor([-1.0, 1.0]))  # type: ignore[operator]
    set_step(model, 5)
    assert not torch.equal(model(batch(0)), plain(batch(0)))
    redundancy_clean(model, config(section))
    assert torch.equal(model.up.weight, plain.up.weight)
    assert not torch.equal(model(batch(0)), plain(batch(0)))  # inputs stay quantised


@pytest.mark.slow
def test_compiled() -> None:
    """torch.compile calculates what eager does, and again after a step."""
    section = weights(["up", "down"]) | {
        "sparse_pruning": {
            "shared_parameters": {"enabled": True, "method": "topk", "schedule_offset": 0},
            "different_groups": {"g": {"modules": ["up"]}},
        }
    }
    torch._dynamo.reset()
    model = net()
    init_compression(model, config(section))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager")
    for step in range(2):
        x = batch(step)
        for each in (model, compiled):
            loss_of(each(x), x).backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad)  # type: ignore[arg-type]
            with torch.no_grad():
                mine.sub_(mine.grad)  # type: ignore[arg-type]
                theirs.copy_(mine)
