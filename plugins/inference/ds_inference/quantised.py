"""Linear layers whose weights are 8 or 4 bits, and the change of a model's layers into them, one at a time."""

from __future__ import annotations

from ds_inference_kit.weights import Quantized, dequantize
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["QuantizedLinear"]


class QuantizedLinear(nn.Module):
    """``F.linear`` with a `Quantized` weight, whose parts are buffers: `q`, `scales` and `lows`.

    The bias, a parameter, is that of the layer before. A program reads the same buffers (`quantized`).
    """

    q: Tensor
    scales: Tensor
    lows: Tensor | None

    def __init__(self, weight: Quantized, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bits, self.group = weight.bits, weight.group
        self.out_features, self.in_features = weight.shape
        self.register_buffer("q", weight.q)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("lows", weight.lows)
        self.bias = bias

    def quantized(self) -> Quantized:
        """The weight, of the buffers themselves."""
        return Quantized(self.q, self.scales, self.lows, self.bits, self.group)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight as it is in the dtype of `x`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, dequantize(self.quantized(), x.dtype), bias)

    def extra_repr(self) -> str:
        """See the base class."""
        kind = "symmetric" if self.lows is None else "with lows"
        return f"{self.in_features}, {self.out_features}, {self.bits} bits, groups of {self.group}, {kind}"
