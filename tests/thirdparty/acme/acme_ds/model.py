"""What acme does to a model."""

from __future__ import annotations

from torch import nn


def freeze_biases(model: nn.Module) -> nn.Module:
    """`model`, none of whose biases is trained."""
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.requires_grad_(False)
    return model
