"""Styles of tp_plans that no family of test_families has, and presets of models that transformers
does not have.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn
from torch.nn import functional

WORDS = 7
WIDTH = 6
INNER = 5
LENGTH = 4
BATCH = 2
STEPS = 3


class Heads(nn.Module):
    """Three heads of two, for two ranks; a norm of each head and a number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 3
        self.head_dim = 2
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(2)
        self.sinks = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.q_proj(x).unflatten(-1, (-1, 2))) * self.sinks[:, None]
        return self.o_proj(heads.tanh().flatten(2))  # type: ignore[no-any-return]


class Gathered(nn.Module):
    """Layers that leave a sum to the module around them, which has a weight that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER)
        self.low = nn.Linear(INNER, WIDTH)
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.low((self.gate(x) * self.scale).tanh())  # type: ignore[no-any-return]


class Shared(nn.Module):
    """Inkling's shared experts: no layers, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.randn(2, INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(2, WIDTH, INNER))

    def forward(self, x: Tensor, *, gammas: Tensor) -> Tensor:
        inner = torch.einsum("bth,nih->btni", x, self.gate_proj).tanh() * gammas[..., None]
        return torch.einsum("btni,nhi->bth", inner, self.down_proj)


class Experts(nn.Module):
    """Every token's sum of two gated experts, and of one that gives back its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(2, WIDTH, INNER))
        self.identity = nn.Identity()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("bth,nih->btni", x, self.gate_up_proj).chunk(2, -1)
        out = torch.einsum("btni,nhi->btnh", gate.tanh() * up, self.down_proj)
        return (out * weights[..., :2, None]).sum(-2) + self.identity(x) * weights[..., 2:]  # type: ignore[no-any-return]


class Styles(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {
        "words": "embedding_rowwise",
        "places": "embedding_colwise",
        "packed.0": "packed_colwise",
        "packed.2": "packed_rowwise",
        "heads": "local_params",
        "heads.q_proj": "colwise",
        "heads.sinks": "colwise",
        "heads.norm": "replicated_with_grad_allreduce",
        "heads.o_proj": "rowwise",
        "gathered": "gather",
        "gathered.gate": "local_colwise",
        "gathered.low": "local_rowwise",
        "shared": "all_reduce",
        "shared.gate_proj": "colwise",
        "shared.down_proj": "rowwise",
        "experts": "moe_tp_experts",
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "experts.identity": "moe_identity_expert",
        "mix": "colwise_gather_output",
        "mixed": "rowwise_split_input",
        "answer": "replicate",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.packed = nn.Sequential(
            nn.Linear(WIDTH, 2 * INNER), nn.Tanh(), nn.Linear(2 * INNER, WIDTH)
        )
        self.heads = Heads()
        self.gathered = Gathered()
        self.shared = Shared()
        self.experts = Experts()
        self.router = nn.Linear(WIDTH, 3)
        self.mix = nn.Linear(WIDTH, 7)
        self.mixed = nn.Linear(7, WIDTH)
        self.answer = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in (self.packed, self.heads, self.gathered):
            x = x + layer(x)
        weights = self.router(x).softmax(-1)
        x = x + self.shared(x, gammas=weights[..., :2]) + self.experts(x, weights)
        logits = self.answer(x + self.mixed(self.mix(x).tanh()))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


CUT = {
    *(
        "words.weight",
        "places.weight",
        "packed.0.weight",
        "packed.0.bias",
        "packed.2.weight",
        "heads.q_proj.weight",
    ),
    *(
        "heads.q_proj.bias",
        "heads.sinks",
        "heads.o_proj.weight",
        "gathered.gate.weight",
        "gathered.gate.bias",
    ),
    *(
        "gathered.low.weight",
        "shared.gate_proj",
        "shared.down_proj",
        "experts.gate_up_proj",
        "experts.down_proj",
    ),
    *("mix.weight", "mix.bias", "mixed.weight"),
}


class Attention(nn.Module):
    """ChatGLM's: all queries, all keys, all values; two queries share a key."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads_per_partition = 4
        self.num_multi_query_groups_per_partition = 2
        self.hidden_size_per_attention_head = 2
        self.query_key_value = nn.Linear(WIDTH, 8 + 4 + 4)
        self.dense = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.num_attention_heads_per_partition
        keys = self.num_multi_query_groups_per_partition
        split = self.query_key_value(x).split([2 * n for n in (queries, keys, keys)], -1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in split)
        k, v = (part.repeat_interleave(queries // keys, 1) for part in (k, v))
        return self.dense(
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(WIDTH, 2 * INNER)
        self.dense_4h_to_h = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.mlp = Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class ChatGLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = Layer()
        self.answer = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.answer(self.layers(self.words(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


CHATGLM = {
    *("layers.self_attention.query_key_value.weight", "layers.self_attention.query_key_value.bias"),
    *(
        "layers.self_attention.dense.weight",
        "layers.mlp.dense_h_to_4h.weight",
        "layers.mlp.dense_h_to_4h.bias",
    ),
    "layers.mlp.dense_4h_to_h.weight",
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return (Styles() if kind == "styles" else ChatGLM()).double()


def errors_and_slices(kind: str, stages: list[int]) -> tuple[dict[str, float], list[str]]:
    """How far losses and weights are from one process, and which parameters are cut."""
    from ds_run_state.slices import SLICES

    import ds_core

    section: dict[str, Any] = {"autotp_size": 2} | (
        {"preset_model": kind} if kind == "chatglm" else {}
    )
    adam = {"lr": 0.02, "eps": 1e-3}
    off: dict[str, float] = {}
    slices: Any = {}
    for stage in stages:
        truth = made(kind)
        optimizer = torch.optim.Adam(truth.parameters(), **adam)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Adam", "params": adam},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
            "tensor_parallel": section,
        }
        engine, *_ = ds_core.initialize(model=made(kind), config=config)
        for step in range(STEPS):
            ids = torch.randint(
                WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
            )
            loss = engine(ids)
            wanted = truth(ids)
            engine.backward(loss)
            engine.step()
            wanted.backward()
            optimizer.step()
            optimizer.zero_grad()
            off[f"loss {step}, stage {stage}"] = abs(loss.item() - wanted.item())
        slices = engine.ctx.stash[SLICES]
        wholes = {n: p.detach() for n, p in truth.named_parameters()}
        for name, param in engine.module.named_parameters():
            mine = slices[name].take(wholes[name]) if name in slices else wholes[name]
            off[f"{name}, stage {stage}"] = float((param.detach() - mine).abs().max())
        engine.destroy()
    return off, sorted(slices)


@pytest.mark.parametrize(("kind", "cut"), [("styles", CUT), ("chatglm", CHATGLM)])
def test_trains_as_one_process(kind: str, cut: set[str]) -> None:
    for off, names in run_ranks(2, errors_and_slices, kind, [0, 3]):
        wrong = {name: value for name, value in off.items() if not value < 1e-12}
        assert not wrong, wrong
        assert set(names) == cut
