"""Tiny random transformers models, the batches they train on, and training with sequences divided
or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
VOCABULARY = 64


def config_of(family: str) -> Any:
    """The config of a tiny model."""
    import transformers as t

    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 64, "use_cache": True, "attention_dropout": 0.0}
    if family == "llama":
        return t.LlamaConfig(**SIZES, **heads, **more)
    if family == "qwen2":
        return t.Qwen2Config(
            **SIZES, **heads, **more, use_sliding_window=True, sliding_window=5, max_window_layers=1
        )  # the second layer has a window
    if family == "phi3":
        return t.Phi3Config(
            **SIZES, **heads, **more, pad_token_id=0, bos_token_id=1, eos_token_id=2
        )
    if family in ("mixtral", "routed"):
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
        routed = {"output_router_logits": family == "routed", "router_aux_loss_coef": 0.5}
        return t.MixtralConfig(**SIZES, **heads, **more, **experts, **routed)
    if family == "deepseek_v2":
        sizes = {
            "kv_lora_rank": 8,
            "q_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
        }
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        experts |= {"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
        both = heads | {"num_key_value_heads": 6}
        return t.DeepseekV2Config(**SIZES, **both, **more, **sizes, **experts)
    none = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    if family == "gpt2":
        return t.GPT2Config(vocab_size=64, n_embd=24, n_layer=2, n_head=3, n_positions=64, **none)
    assert family == "bloom"
    return t.BloomConfig(vocab_size=64, hidden_size=24, n_layer=2, n_head=4)


FAMILIES = ("llama", "gpt2", "bloom", "qwen2", "phi3", "mixtral", "deepseek_v2")


def make_model(family: str, attention: str = "eager") -> Any:
    """A model in fp64, with the same weights each time."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    if family == "strict":
        torch.manual_seed(0)
        return strict(LlamaForCausalLM)(config_of("llama")).double()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of(family), attn_implementation=attention
    ).double()
    if family in ("mixtral", "routed", "deepseek_v2"):
        model.set_experts_implementation("eager")  # grouped products have no fp64
    return model


def strict(base: Any) -> Any:
    """A class of model whose forward takes no further arguments, and gives its loss function labels
    alone.
    """

    class Strict(base):  # type: ignore[misc]
        def forward(
            self,
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            labels=None,
            use_cache=None,
        ):  # type: ignore[no-untyped-def]
            given = {
                "position_ids": position_ids,
                "attention_mask": attention_mask,
                "use_cache": use_cache,
            }
            return super().forward(input_ids=input_ids, labels=labels, **given)

    return Strict


def batch(step: int, length: int, kind: str = "plain", size: int = 2) -> dict[str, Tensor]:
    """Tokens and labels, of which more count at the front than at the back.

    kind: ``padded`` has rows of different lengths; ``packed`` has documents one after the other.
    """
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (size, length), generator=made)
    labels = tokens.clone()
    labels[:, length // 2 :: 2] = -100
    found = {"input_ids": tokens, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(tokens)
        mask[0, length - 3 :] = 0
        labels[mask == 0] = -100
        found["attention_mask"] = mask
    if kind == "packed":
        cuts = [length // 3, length - length // 3]
        found["position_ids"] = torch.cat([torch.arange(n) for n in cuts]).expand(size, -1)
        labels[:, cuts[0]] = -100
    return found


Run = tuple[list[float], dict[str, Tensor], Tensor]
"""Losses of some steps, the weights after them, and the logits of the first batch."""


def plain(family: str, **options: Any) -> Run:
    """Training by hand in one process."""
    steps = options.get("steps", 3)
    kind = options.get("kind", "plain")
    length = options.get("length", 13)
    model = make_model(family, options.get("attention", "eager"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, weight_decay=0.0, eps=options.get("eps", 1e-8)
    )
    losses = []
    logits = torch.empty(0)
    for step in range(steps):
        out = model(**batch(step, length, kind), use_cache=False)
        logits = out.logits.detach() if step == 0 else logits
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}, logits


def trained(family: str, sections: dict[str, Any], **options: Any) -> Run:
    """Training by the engine, with sequences divided as `sections` say."""
    import ds_core

    steps = options.get("steps", 3)
    kind = options.get("kind", "plain")
    length = options.get("length", 13)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "weight_decay": 0.0, "eps": options.get("eps", 1e-8)},
        },
        **sections,
    }
    engine, *_ = ds_core.initialize(
        model=make_model(family, options.get("attention", "eager")), config=config
    )
    if options.get("compiled"):
        engine.compile(backend="aot_eager")
    losses = []
    logits = torch.empty(0)
    for step in range(steps):
        out = engine(**batch(step, length, kind))
        logits = whole(engine, out.logits.detach(), length) if step == 0 else logits
        engine.backward(out.loss)
        engine.step()
        losses.append(float(out.loss.detach()))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights, logits


def whole(engine: Any, logits: Tensor, length: int) -> Tensor:
    """The logits of all positions."""
    from ds_sequence_parallel import Layout, joined
    from ds_sequence_parallel.transform import SHARDED

    sharded = engine.ctx.stash.get(SHARDED)
    if sharded is None:
        return logits
    return joined(logits, sharded.group, Layout(length, sharded.ranks, sharded.ring))


def differences(cases: list[Any]) -> list[list[float]]:
    """For each (family, mode, options): how far losses, weights and logits are from those of one
    process.
    """
    import torch.distributed as dist

    found = []
    for family, mode, options in cases:
        one = plain(family, **options)
        section = {"size": dist.get_world_size(), "mode": mode, **options.get("section", {})}
        mine = trained(
            family, {"sequence_parallel": section, **options.get("sections", {})}, **options
        )
        valid = batch(0, options.get("length", 13), options.get("kind", "plain")).get(
            "attention_mask"
        )
        rows = slice(None) if valid is None else valid.bool()
        found.append(
            [
                max(abs(a - b) for a, b in zip(one[0], mine[0], strict=True)),
                max(float((mine[1][n] - w).abs().max()) for n, w in one[1].items()),
                float((one[2][rows] - mine[2][rows]).abs().max()),
            ]
        )
    return found
