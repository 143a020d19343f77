"""The end of a run: attention is dense again."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from ds_sparse_attention import SparseSelfAttention
from ds_testing import TransformConformance
from ds_testing.one_process import one_process_engine
from torch import Tensor, nn

SECTION = {
    "sparse_attention": {
        "mode": "fixed",
        "block": 4,
        "num_local_blocks": 1,
        "attention": "unidirectional",
    }
}


class TestTransformers(TransformConformance):
    plugin = "ds_sparse_attention.plugin"
    config: ClassVar[Any] = SECTION
    same_outputs = False

    def make_model(self) -> nn.Module:
        hf = pytest.importorskip("transformers")
        small = {
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
        }
        model: nn.Module = hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_attention_heads=4))
        return model

    def make_batch(self) -> Tensor:
        return torch.arange(48).view(3, 16) % 32

    def loss(self, output: Any) -> Tensor:
        loss: Tensor = output.logits.square().mean()
        return loss


def test_modules_of_ones_own_have_no_pattern_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), SparseSelfAttention())
    with one_process_engine(
        model, {"train_batch_size": 1, "optimizer": {"type": "SGD"}, **SECTION}
    ):
        assert model[1].attention is not None
    assert model[1].attention is None
