"""Models of the tests: lists of layers, and the same as one plain module, which knows nothing of
pipelines.
"""

from __future__ import annotations

from typing import Any

import torch
from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

VOCAB = 11
WIDTH = 6
LENGTH = 5
MICRO = 2
SEED = 77


class Block(nn.Module):
    """Takes and gives (hidden, mask); the mask is boolean, and has no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 9)
        self.down = nn.Linear(9, width, bias=False)
        self.register_buffer("shift", torch.full((width,), 0.1))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = inputs
        out = self.down(torch.tanh(self.up(self.norm(hidden)))) + self.get_buffer("shift").to(
            hidden.dtype
        )
        return hidden + out * mask.unsqueeze(-1), mask


def drop_mask(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0]


def embed(module: nn.Embedding, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return module(inputs[0]), inputs[1]


def project(module: nn.Embedding, hidden: Tensor) -> Tensor:
    return hidden @ module.weight.t()


def specs() -> list[Any]:
    """Nine layers, of which the first and the last share a weight."""
    return [
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=embed),
        *(LayerSpec(Block, WIDTH) for _ in range(5)),
        drop_mask,
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, VOCAB, WIDTH, forward_fn=project),
    ]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def pipeline(stages: int, chunks: int = 1, **options: Any) -> PipelineModule:
    """`specs` in stages, with the weights of `Plain`, in fp64."""
    options = {"partition_method": "uniform", "seed_layers": True, "base_seed": SEED, **options}
    model = PipelineModule(
        specs(), num_stages=stages, loss_fn=loss_fn, chunks=chunks, **options
    ).double()
    model.seed_layers = False  # nothing in forward is random
    return model


def two() -> PipelineModule:
    return pipeline(2)


def four() -> PipelineModule:
    return pipeline(4)


def two_chunked() -> PipelineModule:
    return pipeline(2, 2)


def four_chunked() -> PipelineModule:
    return pipeline(4, 2)


class Plain(nn.Module):
    """The same layers in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.tied = nn.ModuleDict()
        self.calls: list[Any] = []
        for index, spec in enumerate(specs()):
            torch.manual_seed(SEED + index)
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied:
                    self.tied[spec.key] = spec.build()
                self.calls.append((spec.forward_fn, self.tied[spec.key]))
            elif isinstance(spec, LayerSpec):
                self.layers[str(index)] = spec.build()
                self.calls.append((None, self.layers[str(index)]))
            else:
                self.calls.append((None, spec))
        self.double()

    def outputs(self, inputs: Any) -> Any:
        for forward_fn, layer in self.calls:
            inputs = forward_fn(layer, inputs) if forward_fn is not None else layer(inputs)
        return inputs

    def forward(self, inputs: Any, labels: Tensor) -> Tensor:
        return loss_fn(self.outputs(inputs), labels)


def batch(step: int, micro: int, index: int, length: int = LENGTH) -> Any:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + index)
    tokens = torch.randint(0, VOCAB, (MICRO, length + 1), generator=generator)
    mask = torch.rand(MICRO, length, generator=generator) > 0.2
    return (tokens[:, :-1], mask), tokens[:, 1:]
