"""The end of a run with divided sequences: each rank's module is its own again, and so are copies
that were made.
"""

from __future__ import annotations

import copy

import pytest
import torch
from ds_sequence_parallel import CrossEntropy, DistributedAttention
from ds_testing.pytest_plugin import Ranks
from ds_testing.truth import start, tiny
from torch import Tensor, nn

from ds_core import comm


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(50, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 50)
        self.attn = DistributedAttention(attend)
        self.loss = CrossEntropy()

    def forward(net, tokens: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:  # noqa: N805 - any name will do
        x = net.tok(tokens)
        q, k, v = net.qkv(x).unflatten(-1, (3, 4, 4)).unbind(2)
        loss: Tensor = net.loss(net.head(x + scale * net.attn(q, k, v).flatten(2)), labels)
        return loss


def written(size: int) -> None:
    model = Net()
    plain = Net()
    engine = start(model, sequence_parallel={"size": size, "inputs": {"tokens": 1, "labels": 1}})
    batch = torch.arange(16).view(2, 8)
    # by place, though the first parameter of forward is not called self
    loss = engine(batch, batch)
    wanted = plain(batch, batch)
    torch.testing.assert_close(loss, wanted)
    engine.backward(loss)
    engine.step()
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    copied = copy.deepcopy(engine.module)
    together = copied(batch, batch)
    torch.testing.assert_close(together, plain(batch, batch))
    engine.destroy()
    own = torch.arange(14).view(2, 7) + comm.rank()  # of an odd length, and each rank has others
    for part in (model, copied, copy.deepcopy(model)):
        torch.testing.assert_close(part(own, own), plain(own, own))


@pytest.mark.parametrize("size", [2, 4])
def test_a_written_model_and_its_copies_are_ordinary(ranks: Ranks, size: int) -> None:
    ranks(size, written, size)


def transformers_model(size: int) -> None:
    model = tiny("llama", use_cache=True)
    plain = copy.deepcopy(model)
    before = set(vars(model))
    engine = start(model, sequence_parallel={"size": size, "tiled_loss": {"shards": 2}})
    batch = torch.arange(16).view(2, 8)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    copied = copy.deepcopy(engine.module)
    engine.destroy()
    plain.load_state_dict(model.state_dict())
    own = torch.arange(14).view(2, 7) + comm.rank()
    wanted = plain(input_ids=own, labels=own)
    for part in (model, copied, copy.deepcopy(model)):
        found = part(input_ids=own, labels=own)
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(found.logits, wanted.logits)
    assert set(vars(model)) == before


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_model_of_transformers_and_its_copies_are_ordinary(ranks: Ranks, size: int) -> None:
    pytest.importorskip("transformers")
    ranks(size, transformers_model, size)
