"""What tests of the section ``flops_profiler`` share: a model of 96 parameters, and reading what is
printed.
"""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Two layers, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def lines(text: str) -> dict[str, str]:
    """Values by name."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}
