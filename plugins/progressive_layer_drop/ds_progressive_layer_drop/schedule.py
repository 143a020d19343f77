"""How likely a layer is to run, by step and depth (Zhang and He 2020, "Accelerating training of
transformer-based language models with progressive layer dropping"), and DeepSpeed's class of it;
torch-free.
"""

from __future__ import annotations

import math
import random
from typing import Any


def theta_at(step: int, theta: float, gamma: float) -> float:
    """theta(t) after `step` optimizer steps: 1 at first, `theta` in the end (api.md section 26)."""
    return (1.0 - theta) * math.exp(-gamma * step) + theta


def keep_probability(index: int, count: int, theta: float) -> float:
    """How likely layer `index` of `count`, from 0, is to run: from nearly 1 for the first down to
    `theta` for the last.

    It is 1 - (index + 1) / count * (1 - theta), the paper's equation 6.
    """
    return 1.0 - (index + 1) / count * (1.0 - theta)


def runs(seed: int, step: int, index: int, probability: float) -> bool:
    """Whether layer `index` runs in this optimizer step.

    It depends on nothing else: ranks, micro-batches, recomputation in backward and a resumed run
    all agree.
    """
    return random.Random(f"progressive layer drop {seed} {step} {index}").random() < probability


class ProgressiveLayerDrop:
    """DeepSpeed's class: theta by step, and what forward is given."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments of forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """theta of the last `update_state`; 1 before."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Take theta of this optimizer step."""
        self.current_theta = theta_at(global_step, self.theta, self.gamma)
