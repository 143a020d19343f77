"""Small models with MoE blocks for the tests of AutoEP: five families of transformers, and two of
our own.
"""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from ds_moe.autoep.presets import Preset
from ds_testing.truth import plain, tiny
from torch import Tensor, nn

FAMILIES = ("mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3")
BATCH = 2
LENGTH = 8
VOCABULARY = 48
EXPERTS = 8


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
_INNER: dict[str, Any] = {"moe_intermediate_size": 12}
_LATENT = _INNER | {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "n_group": 4,
    "topk_group": 2,
}
_LINEAR = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
    "shared_expert_intermediate_size": 12,
    "layer_types": ["linear_attention", "full_attention"],
}


_KEYS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": _INNER | {"shared_expert_intermediate_size": 12, "num_experts": EXPERTS},
    "qwen3_moe": _INNER | {"num_experts": EXPERTS, "norm_topk_prob": True},
    "qwen3_5_moe": _INNER | _LINEAR | {"num_experts": EXPERTS},
    "deepseek_v2": _LATENT
    | {
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": _LATENT | {"n_shared_experts": 1, "first_k_dense_replace": 1},
}


def hugging_face(kind: str, **more: Any) -> Any:
    """A model of the transformers library in fp64, with random weights that are the same in every
    process.
    """
    family = "qwen3_5_moe_text" if kind == "qwen3_5_moe" else kind
    keys = _SIZES | _KEYS[kind] | more
    # The library's fast kernel of experts takes no fp64.
    model = tiny(family, seed=5, experts="eager", **keys).double().train()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "gate.weight" in name or "correction_bias" in name:
            tensor.data.normal_(std=0.5)  # some are made as zeros, with which all experts would tie
    return model


class OldRouter(nn.Module):
    """DeepSeek-V3's before experts were stacked: it gives what it has chosen, and no logits."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(router.weight.detach().clone())
        self.register_buffer(
            "e_score_correction_bias", router.e_score_correction_bias.detach().clone()
        )
        self._now = (router,)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, scores, index = self._now[0](x)
        return index, scores


class OldBlock(nn.Module):
    """The block around it, with a list of experts."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = OldRouter(block.gate)
        self.shared_experts = block.shared_experts
        self.experts = nn.ModuleList()
        for w1, w2 in zip(
            block.experts.gate_up_proj.detach(), block.experts.down_proj.detach(), strict=True
        ):
            expert = type(block.shared_experts)(
                block.config, intermediate_size=w2.shape[1]
            ).double()
            expert.gate_proj.weight.data, expert.up_proj.weight.data = (
                w.clone() for w in w1.chunk(2)
            )
            expert.down_proj.weight.data = w2.clone()
            self.experts.append(expert)


def ids(step: int, rank: int) -> Tensor:
    """Few different tokens, others on each rank, so that routers send them to few experts."""
    torch.manual_seed(100 + 10 * step + rank)
    return torch.randint(6 * rank, 6 * rank + 8, (BATCH, LENGTH))


def texts(step: int, rank: int) -> dict[str, Tensor]:
    """The arguments of the model."""
    tokens = ids(step, rank)
    return {"input_ids": tokens, "labels": tokens}


# -- our own ---------------------------------------------------------------------------------------


class Expert(nn.Module):
    """One expert of a list."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.opening = nn.Linear(hidden, inner, bias=False)
        self.raising = nn.Linear(hidden, inner, bias=False)
        self.lowering = nn.Linear(inner, hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lowering(self.act_fn(self.opening(x)) * self.raising(x))
        return out


class Stacked(nn.Module):
    """Experts whose weights are stacked, gate and up apart."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.opening = nn.Parameter(torch.randn(experts, inner, hidden) / hidden**0.5)
        self.raising = nn.Parameter(torch.randn(experts, inner, hidden) / hidden**0.5)
        self.lowering = nn.Parameter(torch.randn(experts, hidden, inner) / inner**0.5)

    def one(self, number: int, x: Tensor) -> Tensor:
        gate = x @ self.opening[number].T
        up = x @ self.raising[number].T
        return (nn.functional.silu(gate) * up) @ self.lowering[number].T


class Mixture(nn.Module):
    """A block that nobody has a preset for; experts are a list, or stacked."""

    def __init__(self, config: Any, listed: bool) -> None:
        super().__init__()
        hidden = config.hidden
        inner = config.inner
        self.chooser = nn.Linear(hidden, config.how_many, bias=False)
        self.pool: Any = (
            nn.ModuleList([Expert(hidden, inner) for _ in range(config.how_many)])
            if listed
            else Stacked(config.how_many, hidden, inner)
        )
        self.common = Expert(hidden, inner)
        self.common_gate = nn.Linear(hidden, 1, bias=False)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        how = self.config
        scores = self.chooser(flat)
        scores = scores.sigmoid() if how.sigmoid else scores.softmax(-1)
        choice = scores
        if how.groups is not None:
            count, kept = how.groups
            best = scores.view(-1, count, how.how_many // count).max(-1).values.topk(kept).indices
            allowed = torch.zeros(len(flat), count, dtype=torch.bool).scatter(1, best, True)
            choice = scores.masked_fill(~allowed.repeat_interleave(how.how_many // count, 1), -1.0)
        index = choice.topk(how.each).indices
        chosen = scores.gather(1, index)
        chosen = (chosen / chosen.sum(-1, keepdim=True) if how.norm else chosen) * how.scale
        out = self.common(flat) * self.common_gate(flat).sigmoid()
        for number in range(how.how_many):
            token, place = (index == number).nonzero(as_tuple=True)
            rows = flat[token]
            weight = chosen[token, place].unsqueeze(-1)
            given = rows * weight if how.before else rows
            done = (
                self.pool.one(number, given)
                if isinstance(self.pool, Stacked)
                else self.pool[number](given)
            )
            out = out.index_add(0, token, done if how.before else done * weight)
        return out.view_as(x)


def own_config(**how: Any) -> SimpleNamespace:
    """The config of such a block. how: what shall be otherwise."""
    plain = {
        "hidden": 16,
        "inner": 12,
        "how_many": EXPERTS,
        "each": 2,
        "hidden_act": "silu",
        "model_type": "own",
    }
    asked = {"sigmoid": False, "norm": True, "scale": 1.0, "groups": None, "before": False}
    return SimpleNamespace(**plain | asked | how)


class Own(nn.Module):
    """A language model of our own with two such blocks. how: attributes of its config, see
    `Mixture`.
    """

    def __init__(self, listed: bool, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.config = own_config(**how)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.stack = nn.ModuleList(
            [nn.ModuleDict({"moe": Mixture(self.config, listed)}) for _ in range(2)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer, norm in zip(self.stack, self.norms, strict=True):
            x = x + layer["moe"](norm(x))  # type: ignore[index]
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


OWN_PATTERNS = {
    "moe_layer_pattern": r"stack\.\d+\.moe",
    "router_pattern": "chooser",
    "expert_pattern": "pool",
    "has_shared_experts": True,
    "shared_experts_pattern": "common",
    "shared_experts_gate_pattern": "common_gate",
    "expert_w1": "opening",
    "expert_w2": "lowering",
    "expert_w3": "raising",
    "num_experts_attr": "how_many",
    "top_k_attr": "each",
}
"""What makes AutoEP see the blocks of `Own`."""

PRESET = Preset(
    "own",
    ("own",),
    layers=r"stack\.\d+\.moe",
    router="chooser",
    experts="pool",
    shared="common",
    shared_gate="common_gate",
    w1="opening",
    w2="lowering",
    w3="raising",
    listed=("opening", "lowering", "raising"),
    num_experts="how_many",
    top_k="each",
    normalise="norm",
    scale="scale",
)
"""What a plugin would offer for `Own`."""


# -- training --------------------------------------------------------------------------------------

STEPS = 10
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}}
"""A smaller eps would blow up the rounding of gradients that are almost nothing."""


def alone(model: Any, world: int, steps: Any = STEPS) -> list[float]:
    """Losses of one process of plain torch that takes all ranks' batches."""
    return plain(model, texts, steps, count=world, clip=0.5, optimizer=ADAMW)


def unless_installed(**sections: str) -> list[str]:
    """Section -> its declaration module, as ``plugins.load`` has it, of those that no installed
    distribution owns.
    """
    owned = {entry.name for entry in metadata.entry_points(group="ds_core.plugins")}
    return [f"{section}={module}" for section, module in sections.items() if section not in owned]


def settings(ep: int, stage: int, **section: Any) -> dict[str, Any]:
    """The config of a run; section: keys of expert_parallel. ep 0: without it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.5,
        "optimizer": ADAMW,
        "plugins": {"load": ["ds_zero.plugin", *unless_installed(expert_parallel="ds_moe.plugin")]},
    }
    if ep:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep, **section}
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 20}
    return config
