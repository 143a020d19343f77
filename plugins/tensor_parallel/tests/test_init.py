"""A model made under ds_zero.Init: cut one weight at a time, and then the model that was made
plainly.
"""

from __future__ import annotations

from typing import Any

import torch
from ds_testing import run_ranks
from torch import Tensor, nn

from ds_core.errors import UsageError


def config(tp: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
        "tensor_parallel": {"autotp_size": tp},
    }


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
    )


def trained(tp: int, *, init: bool) -> list[Tensor]:
    """Losses of two steps, and this rank's weights."""
    import ds_zero

    import ds_core

    with ds_zero.Init(config_dict_or_path=config(tp), enabled=init):
        model = llama()
    assert all(bool(p.numel()) is not init for p in model.parameters())
    engine = ds_core.initialize(model=model, config=config(tp))[0]
    found = []
    for step in range(2):
        tokens = torch.randint(
            50,
            (2, 9),
            generator=torch.Generator().manual_seed(engine.ctx.mesh.index("dp") + 7 * step),
        )
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach())
    engine.destroy()  # weights are whole again, but for tp
    return found + [p.detach().clone() for p in engine.module.parameters()]


def both(tp: int) -> int:
    plain = trained(tp, init=False)
    lazily = trained(tp, init=True)
    for i, (mine, theirs) in enumerate(zip(lazily, plain, strict=True)):
        assert torch.equal(mine, theirs), i
    return sum(t.numel() for t in lazily)


def test_a_model_made_under_init_is_the_model_made_plainly() -> None:
    assert len(set(run_ranks(4, both, 2))) == 1


def over_others() -> str:
    import ds_zero

    import ds_core

    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    with ds_zero.Init(data_parallel_group=alone, config_dict_or_path=config(2)):
        model = llama()
    try:
        ds_core.initialize(model=model, config=config(2))
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_may_have_other_values_are_an_error() -> None:
    assert (
        "was made by ds_zero.Init over ranks [0], and the ranks along tp are [0, 1]"
        in run_ranks(2, over_others)[0]
    )
