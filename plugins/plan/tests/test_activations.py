"""`dscore plan --tokens`: what autograd keeps of a model without memory is what it keeps of the
same model with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_command_kit.app import make_app
from ds_plan.activations import count_activations
from ds_plan.models import divide_matrices
from torch import Tensor, nn
from typer.testing import CliRunner

D = 8
WORDS = 50
LAYERS = 3


class Block(nn.Module):
    """Saves its input and the output of tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 3 * D)
        self.down = nn.Linear(3 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    """Takes token ids; tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss


class Branches(Net):
    """Looks at values, which nobody has without memory."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).sum() if ids.sum() > 3 else self.words(ids).mean()


def kept(model: nn.Module, tokens: int) -> int:
    """Bytes that a real forward leaves."""
    seen: dict[int, Any] = {}
    weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.ones(1, tokens, dtype=torch.long))
    return sum(storage.nbytes() for key, storage in seen.items() if key not in weights)


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def test_it_is_what_a_real_forward_keeps() -> None:
    found = count_activations(on_meta(Net), 16)
    row = 16 * 4
    assert found.kept == kept(Net(), 16)
    inside = LAYERS * 4 * D * row
    outside = found.kept - LAYERS * 4 * D * row
    assert found.recomputed == outside + LAYERS * D * row + inside // LAYERS
    alone = count_activations(
        on_meta(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))), 5
    )  # type: ignore[arg-type]
    # what Linear takes, and the tokens
    assert (alone.kept, alone.recomputed) == (5 * 4 * 4 + 5 * 8, None)


def test_divided_matrices() -> None:
    whole = on_meta(Net)
    part = divide_matrices(whole, 3)
    assert [tuple(p.shape) for p in part.parameters()][:3] == [(17, D), (D, D), (3 * D,)]
    assert part.head.weight is part.words.weight
    assert whole.words.weight.shape == (WORDS, D)
    assert divide_matrices(whole, 1) is whole


def plan(*arguments: str, **config: Any) -> Any:
    Path("c.json").write_text(json.dumps({"bf16": {"enabled": True}, **config}))
    return CliRunner().invoke(
        make_app(), ["plan", "--world", "4", "--config", "c.json", *arguments]
    )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "here", sys.modules[__name__])
    model = ("--model", "here:Net", "--tokens", "30")
    alone = json.loads(plan(*model, "--json").output)
    sections: Any = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel": {"size": 2}}
    both = json.loads(plan(*model, "--json", **sections).output)
    assert (alone["tensor_parallel"], alone["activations"]["tokens"]) == (1, 30)
    assert (both["tensor_parallel"], both["activations"]["tokens"]) == (2, 15)
    assert both["parameters"] == alone["parameters"]
    vectors = LAYERS * (3 * D + D) * 2  # bytes of biases
    weights = [found["choices"][0]["device"]["parameters"] - vectors for found in (alone, both)]
    assert weights[0] == 2 * weights[1]
    shown = plan(*model, **sections).output
    assert "on 4 ranks, each 2 that divide matrices evenly" in shown
    assert "activations of a rank's 15 tokens, undivided layers: " in shown
    room = ("--device-memory", "200KB")
    assert "stage" in json.loads(plan(*model, *room, "--json").output)["reason"]
    for arguments, why in (
        (("--params", "1M", "--tokens", "8"), "give --model instead of --params"),
        (
            ("--model", "here:Branches", "--tokens", "8"),
            "the forward of Branches failed on token ids of shape (1, 8)",
        ),
    ):
        done = plan(*arguments)
        assert done.exit_code == 2
        assert why in " ".join((done.output + done.stderr).split())
