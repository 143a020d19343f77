"""Small models of transformers, and one process of plain torch that trains them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 2, 8, 64
ADAM = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}


def hugging_face(kind: str, **more: Any) -> Any:
    """A causal language model in fp64, with random weights that are the same in every process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    common: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(5)
    config: Any
    if kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = hf.GPT2Config(**common | sizes | drop | more)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
        config = hf.LlamaConfig(**common | sizes | heads | more)
    model: Any = hf.AutoModelForCausalLM.from_config(config).double().train()
    for param in model.parameters():
        if param.dim() == 1:
            param.data.add_(torch.randn_like(param) * 0.1)  # zeros and ones would hide mistakes
    return model


def ids(step: int, rank: int) -> Tensor:
    """The batch of a data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def settings(tp: int, stage: int = 0, **keys: Any) -> dict[str, Any]:
    """A config."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp, **keys},
    }


def plain(model: nn.Module, dp: int, steps: int, clip: float = 0.0) -> list[float]:
    """Losses of one process that sees the batches of all data-parallel ranks."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), **ADAM), []
    for step in range(steps):
        total = 0.0
        for rank in range(dp):
            batch = ids(step, rank)
            loss = model(input_ids=batch, labels=batch).loss / dp
            loss.backward()
            total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(engine: Any, steps: int) -> list[float]:
    """Losses of this rank's batches."""
    losses, rank = [], engine.ctx.mesh.index("dp")
    for step in range(steps):
        batch = ids(step, rank)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_off(engine: Any, truth: nn.Module) -> float:
    """The largest difference of this rank's parts of the weights from those of one process."""
    from ds_run_state.slices import SLICES

    slices = engine.ctx.stash.get(SLICES) or {}
    wholes, off = dict(truth.named_parameters()), 0.0
    for name, param in engine.module.named_parameters():
        full = wholes[name].detach()
        mine = slices[name].take(full) if name in slices else full
        assert mine.shape == param.shape, f"{name}: {tuple(param.shape)}, not {tuple(mine.shape)}"
        off = max(off, float((param.detach() - mine).abs().max()))
    return off
