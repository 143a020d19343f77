"""A small decoder in plain torch: one module, the same as a pipeline, and with experts. Its widths
divide by nothing.

`blocks` of it know nothing of tensor parallelism (its linear layers have usual names); attention
and loss are modules of dscore-sequence-parallel, which in one process are torch's own. In fp64 all of
it is fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ds_moe import MoE
from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from ds_sequence_parallel import CrossEntropy, DistributedAttention
from ds_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

VOCABULARY = 13
WIDTH = 8
HEADS = 4
INNER = 11
LENGTH = 8
MICRO = 2
BLOCKS = 2
SEED = 77
INPUTS = {"ids": 1, "places": 1, "labels": 1}
"""Arguments of the model, and where the sequence is: for sequence_parallel.inputs."""


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [batch, positions, heads, size]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(
        1, 2
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.core = DistributedAttention(attend)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = (
            p(hidden).unflatten(-1, (-1, self.head_dim))
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.core(*heads).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.up_proj(hidden)))  # type: ignore[no-any-return]


class Norm(nn.LayerNorm):
    """Biases of zero would hide mistakes, and make rounding of fp32 large beside what little
    training adds to them.
    """

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 1.0, 0.3)
        nn.init.normal_(self.bias, 0.0, 0.3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Norm(WIDTH)
        self.second = Norm(WIDTH)
        self.attention = Attention()
        self.mlp = MLP()
        # Nothing is dropped unless a trial sets its share.
        self.drop = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.drop(self.mlp(self.second(hidden)))  # type: ignore[no-any-return]


class WrittenBlock(Block):
    """Of layers that know how they are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.attention.q_proj, self.attention.k_proj, self.attention.v_proj = (
            ColumnParallelLinear(WIDTH, WIDTH, unit=WIDTH // HEADS) for _ in "qkv"
        )
        self.attention.o_proj = RowParallelLinear(WIDTH, WIDTH, unit=WIDTH // HEADS)
        self.mlp.up_proj = ColumnParallelLinear(WIDTH, INNER)
        self.mlp.down_proj = RowParallelLinear(INNER, WIDTH)


class ExpertBlock(Block):
    """A block whose MLP is one of four, chosen by each token."""

    ranks = 1

    def __init__(self) -> None:
        super().__init__()
        options = {"use_rts": False, "drop_tokens": False, "min_capacity": 0}
        self.mlp = MoE(WIDTH, MLP(), 4, ep_size=self.ranks, **options)  # type: ignore[assignment, arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.drop(self.mlp(self.second(hidden))[0])  # type: ignore[no-any-return]


class DividedExpertBlock(ExpertBlock):
    """Two ranks have two of the experts each."""

    ranks = 2


class Embedding(nn.Module):
    """Of tokens and places. Its table is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        ids, places = inputs
        return self.tokens(ids) + self.places(places)  # type: ignore[no-any-return]


def project(embedding: Embedding, hidden: Tensor) -> Tensor:
    """The logits, by the table of the embedding."""
    return hidden @ embedding.tokens.weight.t()


def seeded(make: Any, index: int) -> Any:
    """What `make` makes, always the same for one index."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + index)
        return make()


class Decoder(nn.Module):
    """Names of parameters are those of `pipeline`'s: the two load each other's weights."""

    def __init__(self, block: Any = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): seeded(block, i) for i in range(1, BLOCKS + 1)})
        self.layers[str(BLOCKS + 1)] = seeded(lambda: Norm(WIDTH), BLOCKS + 1)
        self.tied = nn.ModuleDict({"embedding": seeded(Embedding, 0)})
        self.loss = CrossEntropy()

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tied["embedding"]((ids, places))
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.loss(project(self.tied["embedding"], hidden), labels)  # type: ignore[no-any-return, arg-type]


class Spare(Decoder):
    """With layers that are never used, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = seeded(MLP, 90)
        self.head = seeded(lambda: nn.Linear(WIDTH, VOCABULARY, bias=False), 91)

    def forward(self, ids: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tied["embedding"]((ids, places))
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.loss(self.head(hidden), labels)  # type: ignore[no-any-return]


def whole() -> nn.Module:
    return Decoder()


def spare() -> nn.Module:
    return Spare()


def experts() -> nn.Module:
    """Each rank has all of them."""
    return Decoder(ExpertBlock)


def divided_experts() -> nn.Module:
    return Decoder(DividedExpertBlock)


def batch(step: int, micro: int, index: int) -> Mapping[str, Tensor]:
    """Labels are missing in uneven parts of the sequence, and of the batch."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + index)
    tokens = torch.randint(0, VOCABULARY, (MICRO, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : 3 + index] = -100
    return {
        "ids": tokens[:, :-1],
        "places": torch.arange(LENGTH).expand(MICRO, -1),
        "labels": labels,
    }


# -- as a pipeline ---------------------------------------------------------------------------------


def specs(block: Any = Block) -> list[Any]:
    return [
        TiedLayerSpec("embedding", Embedding, tied_weight_attr=()),
        *(LayerSpec(block) for _ in range(BLOCKS)),
        LayerSpec(Norm, WIDTH),
        TiedLayerSpec("embedding", Embedding, forward_fn=project, tied_weight_attr=()),
    ]


def pipeline(block: Any = Block, stages: int = 2, chunks: int = 1) -> nn.Module:
    """In stages, each of so many parts of the model."""
    options: dict[str, Any] = {
        "seed_layers": True,
        "base_seed": SEED,
        "partition_method": "uniform",
        "chunks": chunks,
    }
    model = PipelineModule(specs(block), num_stages=stages, loss_fn=CrossEntropy(), **options)
    model.seed_layers = False  # nothing in forward is random
    return model


def undivided() -> nn.Module:
    """`pipeline` in one process."""
    return Plain()


def written_pipeline() -> nn.Module:
    return pipeline(WrittenBlock)


def written_plain() -> nn.Module:
    return Plain(WrittenBlock)


class Plain(Decoder):
    def forward(self, inputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*inputs, labels)


def pipe_batch(step: int, micro: int, index: int) -> Any:
    """`batch` as a pipeline takes it."""
    found = batch(step, micro, index)
    return (found["ids"], found["places"]), found["labels"]
