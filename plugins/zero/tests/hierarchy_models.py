"""A model under hpZ and MiCS, compared with plain stage 3."""

from __future__ import annotations

from typing import Any

import torch
from ds_testing.truth import start, whole_weights
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


def three_steps(
    zero: dict[str, Any], extra: dict[str, Any], *, exact: bool = False, steps: int = 3
) -> dict[str, Tensor]:
    """Losses and weights after some steps. exact: gradients are rounded, so that every sum is
    exact.
    """
    from ds_core import comm

    torch.manual_seed(comm.rank())
    model = Net().double() if exact else Net()
    if exact:
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: (grad * 2**24).round() / 2**24)
    adamw = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}
    section = {"stage": 3, **SMALL, **zero}
    sections = {"clip": 1.0, "optimizer": adamw, **extra, "zero_optimization": section}
    engine = start(model, **sections)
    found = {}
    for step in range(steps * engine.gradient_accumulation_steps()):
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
    truth = three_steps(plain or {}, extra, exact=exact)
    answers = []
    for variant in variants:
        found = three_steps(variant, extra, exact=exact)
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
