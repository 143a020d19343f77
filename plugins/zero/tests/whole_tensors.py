"""A plugin whose optimizers say that they need whole tensors: LAMB, and torch's AdamW and SGD under
the same flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_core.entries import OptimizerEntry


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """What this plugin is for; two of them take over names of the core's."""
    return {
        "PaperLamb": OptimizerEntry("plugins.zero.tests.whole_tensors:PaperLamb", grain="tensor"),
        "AdamW": OptimizerEntry(
            "ds_core.setup.optim:make_adam", "ds_core.setup.optim:AdamWParams", grain="tensor"
        ),
        "SGD": OptimizerEntry("torch.optim:SGD", grain="tensor"),
    }


class PaperLamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with phi(x) = x.

    Keeps what it looked at, to have states of odd shapes.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, weight_decay: float = 0.1, eps: float = 1e-6
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": weight_decay, "eps": eps}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Any, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["m"] = torch.zeros_like(param)
            state["v"] = torch.zeros_like(param)
            state["ratio"] = torch.ones((), dtype=param.dtype)
        state["step"] += 1
        first, second = group["betas"]
        state["m"].mul_(first).add_(param.grad, alpha=1 - first)
        state["v"].mul_(second).add_(param.grad.square(), alpha=1 - second)
        t = state["step"].item()
        r = (state["m"] / (1 - first**t)) / ((state["v"] / (1 - second**t)).sqrt() + group["eps"])
        r = r + group["weight_decay"] * param
        norms = torch.stack([param.norm(), r.norm()])
        # The last ratio has a say too, so that a run that lost it would go elsewhere.
        ratio = norms[0] / norms[1] if bool((norms > 0).all()) else torch.ones_like(norms[0])
        state["ratio"] = 0.5 * state["ratio"] + 0.5 * ratio
        state["norms"] = norms if "norms" not in state else 0.5 * (norms + state["norms"])
        param.add_(r * (state["ratio"] + 0.01 * state["norms"].sum()), alpha=-group["lr"])


class Unknown(torch.optim.AdamW):
    """Nobody has declared this one."""


class Adam(PaperLamb):
    """Not what its name says."""
