"""Linear layers that compute with few bits. Names and shapes of parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional


class FewBits(nn.Linear):
    """Computes with rounded weights; the gradient goes to the weights as they are."""

    bits: int

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.detach()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (self.bits - 1) - 1)
        rounded = self.weight + ((weight / scale).round() * scale - weight)
        return functional.linear(input, rounded, self.bias)


def converter(bits: int) -> Callable[[nn.Module], nn.Module]:
    """A function that makes every Linear of a model a `FewBits`."""

    def convert(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FewBits
                module.bits = bits  # type: ignore[assignment]
        return model

    return convert
