"""Models that draw random numbers, and their runs in a layout and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ds_moe import MoE
from ds_pipeline import LayerSpec, PipelineModule
from ds_sequence_parallel import DistributedAttention
from ds_testing.truth import start, tiny, train, whole_weights
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6
MICRO = 2
TOKENS = 8
DEALT = {"samples": "blocks"}
"""`ds_testing.truth.train` deals micro-batches to ranks in turn."""

Found = tuple[list[float], dict[str, Tensor]]
"""Losses and whole weights."""


class Block(nn.Module):
    """Drops by a module that is called twice, and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.up(x).tanh(), 0.2, self.training)
        added: Tensor = self.drop(self.down(self.drop(hidden)))
        return x + added


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


class Attention(nn.Module):
    """Over the whole sequence, with dropout of its weights."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = DistributedAttention(self._attend)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        p = 0.3 if self.training else 0.0
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return out.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.num_heads, -1)
        query, key, value = (part.reshape(shape) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.attend(query, key, value)
        return out.flatten(2)


class Tokens(nn.Module):
    """Attention and a block, of [samples, positions, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, WIDTH)
        self.attention = Attention()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x)
        out: Tensor = self.block(x)
        return out


class Routed(nn.Module):
    """Experts behind a gate with noise, and dropout around them."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
        self.first = nn.Linear(5, WIDTH)
        self.moe = MoE(
            *(WIDTH, expert, 4, ep),
            k=2,
            drop_tokens=False,
            noisy_gate_policy="Jitter",
        )
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        out: Tensor = self.drop(x + self.moe(x)[0])
        return out


class Layer(Block):
    """The same weights on whichever stage it is built."""

    def __init__(self, index: int) -> None:
        torch.manual_seed(index)
        super().__init__()
        self.double()


def pipeline(stages: int, chunks: int = 1) -> nn.Module:
    """Four blocks; the loss is a mean square."""
    return PipelineModule(
        [LayerSpec(Layer, index) for index in range(4)],
        num_stages=stages,
        chunks=chunks,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )


def gpt2(**config: Any) -> nn.Module:
    """Dropout after embeddings, of attention's weights, and before residuals."""
    model: nn.Module = tiny("gpt2", n_embd=24, n_layer=2, n_head=6, **config).double()
    return model


def trained(model: nn.Module, batches: Callable[[int, int], Any], **config: Any) -> Found:
    """Losses and weights of three steps."""
    config = {"micro": MICRO, "reproducibility": DEALT} | config
    engine = start(model, **config)
    # Ranks along sp have the same samples.
    mesh = engine.ctx.mesh
    along = mesh.size("sp") if mesh.has("sp") else 1
    losses = train(engine, lambda step, index: batches(step, index // along))
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights


def piped(stages: int, gas: int, chunks: int = 1, interval: int = 0, **config: Any) -> Found:
    """Losses and weights of a pipeline; interval: layers that are recomputed together."""
    model: Any = pipeline(stages, chunks)
    model.activation_checkpoint_interval = interval
    engine = start(model, **{"micro": MICRO, "gas": gas, "reproducibility": DEALT} | config)
    mesh = engine.ctx.mesh

    def pairs(step: int) -> Any:
        for micro in range(gas):
            x = batch(step, micro * mesh.size("dp") + mesh.index("dp"))
            yield functional.pad(x, (0, 1)), x.new_zeros(MICRO, TOKENS, WIDTH)

    losses = [engine.train_batch(pairs(step)).item() for step in range(3)]
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "blocks": lambda ep: Net().double(),
    "attention": lambda ep: Tokens().double(),
    "experts": lambda ep: Routed(ep).double(),
    "encoder": lambda ep: encoder(),
    "gpt2": lambda ep: gpt2(),
    "gpt2, eager": lambda ep: gpt2(attn_implementation="eager"),
    "bert": lambda ep: tiny(
        "bert",
        auto="AutoModelForMaskedLM",
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.2,
    ).double(),
    "llama": lambda ep: tiny(
        "llama", attention_dropout=0.2, num_attention_heads=4, num_key_value_heads=2
    ).double(),
}
"""By the number of ranks that share experts."""


def encoder() -> nn.Module:
    """torch's own, whose attention drops in a function of many arguments."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(5, 1, 12, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def run(kind: str, gas: int, ep: int = 1, length: int = TOKENS, **config: Any) -> Found:
    """Losses and weights of one of `MODELS`."""
    model = MODELS[kind](ep)

    def batches(step: int, index: int) -> Any:
        if not hasattr(model, "config"):
            return batch(step, index)[:, :length]
        return {name: value[:, :length] for name, value in ids(step, index).items()}

    return trained(model, batches, gas=gas, **config)


def batch(step: int, index: int) -> Tensor:
    """[MICRO, TOKENS, 5], fp64."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(MICRO, TOKENS, 5, generator=generator, dtype=torch.float64)


def ids(step: int, index: int) -> dict[str, Tensor]:
    """Tokens of a language model, and labels."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(2, 60, (MICRO, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
