"""`safe_get_full_optimizer_state` of what an optimizer keeps of whole matrices, on any layout."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from ds_testing import run_ranks

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SOAP": ("left_factor", {"precondition_frequency": 1}),
    "Shampoo": ("right_factor", {"precondition_frequency": 1, "damping": 1e-4}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "z0": (2, {}),
    "z3 offload": (
        2,
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    ),
    "z3 nvme": (
        2,
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 64,
                "offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()},
            }
        },
    ),
    "tp z2": (4, {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 2}}),
}
NAME = "up_proj.weight"


def seen(kind: str, sections: dict[str, Any]) -> dict[str, Any]:
    """The state after two steps, what it is after it was set, and what other keys say."""
    import torch
    from ds_access import safe_get_full_optimizer_state, safe_set_full_optimizer_state
    from ds_testing.truth import start
    from torch import nn

    from ds_core.errors import UsageError

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Linear(6, 10)
            self.down_proj = nn.Linear(10, 5)

        def forward(self, x: Any) -> Any:
            return self.down_proj(torch.tanh(self.up_proj(x)))

    torch.manual_seed(0)
    key, params = KINDS[kind]
    optimizer = {"type": kind, "params": {"lr": 0.01, **params}}
    engine = start(Model().double(), optimizer=optimizer, **sections)
    weight = dict(engine.module.named_parameters())[NAME]
    mesh = engine.ctx.mesh
    count = 8 // mesh.size("dp")
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        mine = x[mesh.index("dp") * count :][:count]
        engine.backward(engine(mine).square().mean())
        engine.step()
    # What a store has leaves memory, all of it.
    memory = [
        value.untyped_storage().nbytes()
        for state in engine.optimizer.state.values()
        for value in state.values()
        if value.dim() and value.numel()
    ]
    found = safe_get_full_optimizer_state(weight, key)
    safe_set_full_optimizer_state(weight, 2 * found, key)
    again = safe_get_full_optimizer_state(weight, key)
    errors = []
    wrong = (ValueError, UsageError)
    for other in ("no_such_key", key):
        with pytest.raises(wrong, match="no_such_key|shape") as caught:
            safe_set_full_optimizer_state(weight, torch.ones(1), other)
        errors.append(str(caught.value))
    engine.destroy()
    return {"state": found.cpu(), "again": again.cpu(), "errors": errors, "memory": memory}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("SOAP", "z3 offload"),
        ("SOAP", "z3 nvme"),
        pytest.param("SOAP", "z0", marks=pytest.mark.slow),
        pytest.param("SOAP", "tp z2", marks=pytest.mark.slow),
        pytest.param("Shampoo", "z0", marks=pytest.mark.slow),
        pytest.param("Shampoo", "tp z2", marks=pytest.mark.slow),
        pytest.param("Shampoo", "z3 nvme", marks=pytest.mark.slow),
    ],
)
def test_every_rank_sees_the_state_of_one_process(kind: str, layout: str) -> None:
    wanted = run_ranks(1, seen, kind, {})[0]["state"]
    ranks, sections = LAYOUTS[layout]
    for rank in run_ranks(ranks, seen, kind, sections):
        assert rank["state"].shape == wanted.shape
        assert float((rank["state"] - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())
        assert bool((rank["again"] == 2 * rank["state"]).all())
        assert "no_such_key" in rank["errors"][0]
        assert "shape" in rank["errors"][1]
        assert any(rank["memory"]) == (layout != "z3 nvme")
