"""`redundancy_clean` and layer reduction: the same outputs, plain names and classes, smaller
layers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_compression import init_compression, redundancy_clean, set_step, student_initialization
from torch import Tensor, nn

from ds_core.errors import ConfigError, UsageError

sys.path.insert(0, str(Path(__file__).parent))
from compressed_runs import WIDTH, batch, config, net  # noqa: E402


def pruning(
    technique: str, modules: list[str], related: Any = None, ratio: float = 0.5, **shared: Any
) -> Any:
    group = {"params": {"dense_ratio": ratio}, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    return {technique: {"shared_parameters": shared, "different_groups": {"g": group}}}


BITS = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True},
        "different_groups": {
            "g": {"params": {"start_bits": 8, "target_bits": 5}, "modules": ["*"]}
        },
    }
}


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_rows_are_cut(method: str) -> None:
    section = pruning("row_pruning", ["up"], [["down"]], 0.3, method=method) | BITS
    model = init_compression(net(), config(section))
    set_step(model, 50)
    before = model(batch(0))
    assert redundancy_clean(model, config(section)) is model
    assert type(model.up) is nn.Linear and set(model.state_dict()) == set(net().state_dict())  # type: ignore[attr-defined]
    assert model.up.weight.shape == (5, WIDTH) and model.up.bias.shape == (5,)  # type: ignore[attr-defined]
    assert (model.up.out_features, model.down.in_features) == (5, 5)  # type: ignore[attr-defined]
    assert torch.allclose(model(batch(0)), before, atol=1e-12)
    # An architecture of the same config takes the cleaned state.
    other = redundancy_clean(net(7), config(section))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch(0)), model(batch(0)))


def test_without_related_modules_zeros_stay() -> None:
    section = pruning("row_pruning", ["up"]) | pruning("sparse_pruning", ["down"], ratio=0.25)
    model = init_compression(net(), config(section))
    before = model(batch(0))
    redundancy_clean(model, config(section))
    up = model.up  # type: ignore[attr-defined]
    down = model.down  # type: ignore[attr-defined]
    assert up.weight.shape == (16, WIDTH) and int((up.weight.abs().sum(1) == 0).sum()) == 8
    assert int((down.weight != 0).sum()) == 32
    assert torch.allclose(model(batch(0)), before, atol=1e-12)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(self.second(x).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_channels_are_cut(method: str) -> None:
    torch.manual_seed(1)
    model = Convolutions().double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    section = pruning(
        "channel_pruning", ["first", "second"], [["norm", "second"], ["head"]], method=method
    )
    with torch.no_grad():
        model.norm.bias.zero_()  # a pruned channel would come out of the norm as its bias
        model.norm.running_mean.zero_()  # type: ignore[union-attr]
    init_compression(model, config(section))
    before = model(x)
    redundancy_clean(model, config(section))
    assert model.first.weight.shape == (4, 3, 3, 3) and model.second.weight.shape == (3, 4, 3, 3)
    assert model.norm.num_features == 4 and model.head.weight.shape == (4, 3 * 16)
    assert torch.allclose(model(x), before, atol=1e-12)
    model.train()(x).sum().backward()


def test_related_modules_that_do_not_fit_change_nothing() -> None:
    for related, words in (([["nothing"]], "matches 0 layers"), ([["up"]], "no multiple of 16")):
        section = pruning("row_pruning", ["up"], related)
        model = init_compression(net(), config(section))
        with pytest.raises(ConfigError, match=words):
            redundancy_clean(model, config(section))
        assert "up.row_pruning_mask" in model.state_dict()
    assert (BITS | pruning("head_pruning", ["down"], num_heads=4))["head_pruning"]


def test_related_modules_of_other_models_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    section = pruning("row_pruning", ["up"], [["norm_of_another", "down"]])
    model = init_compression(net(), config(section))
    set_step(model, 50)
    before = model(batch(0))
    redundancy_clean(model, config(section))
    assert model.down.in_features == model.up.out_features < net().up.out_features  # type: ignore[attr-defined]
    assert torch.allclose(model(batch(0)), before, atol=1e-12)
    assert "'norm_of_another' matches no layer" in caplog.text


def bert() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    torch.manual_seed(5)
    settings = hf.BertConfig(vocab_size=32, max_position_embeddings=16, num_labels=3, **sizes)
    return hf.BertForSequenceClassification(settings).double().eval()


TUTORIAL = pruning(
    "head_pruning",
    ["attention.output.dense"],
    [["self.query", "self.key", "self.value"]],
    num_heads=4,
) | pruning("row_pruning", ["intermediate.dense"], [[r"layer.\w+.output.dense"]], method="topk")


def test_the_release_leaves_the_number_of_heads_to_the_script() -> None:
    from ds_compression import deepspeed_names

    pytest.importorskip("transformers")
    model = bert()
    assert not deepspeed_names.is_prepared(model)
    init_compression(model, config(TUTORIAL))
    assert deepspeed_names.is_prepared(model)
    deepspeed_names.redundancy_clean(model, config(TUTORIAL))
    attention = model.bert.encoder.layer[0].attention.self
    assert attention.query.out_features == 8
    assert attention.num_attention_heads == 4


def test_bert_of_the_tutorial() -> None:
    pytest.importorskip("transformers")
    model = bert()
    ids = torch.arange(10).view(2, 5)
    init_compression(model, config(TUTORIAL | BITS))
    set_step(model, 9)
    before = model(ids).logits
    redundancy_clean(model, config(TUTORIAL | BITS))
    layer = model.bert.encoder.layer[1]
    assert layer.attention.self.query.weight.shape == (
        8,
        16,
    ) and layer.attention.output.dense.weight.shape == (16, 8)
    assert layer.intermediate.dense.weight.shape == (
        12,
        16,
    ) and layer.output.dense.weight.shape == (16, 12)
    assert torch.allclose(model(ids).logits, before, atol=1e-10)
    assert set(model.state_dict()) == set(bert().state_dict())


TOKENS = {"bos_token_id": 0, "eos_token_id": None}


def test_gpt2_has_its_weights_the_other_way_round() -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(5)
    settings = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, vocab_size=32, **TOKENS)
    model = hf.GPT2LMHeadModel(settings).double().eval()
    section = (
        pruning("row_pruning", ["c_fc"], [[r"mlp.c_proj"]])
        | pruning("head_pruning", ["attn.c_proj"], [["c_attn"]], num_heads=2)
        | BITS
    )
    ids = torch.arange(8).view(1, 8)
    init_compression(model, config(section))
    set_step(model, 9)
    before = model(ids).logits
    redundancy_clean(model, config(section))
    block = model.transformer.h[0]
    assert block.mlp.c_fc.weight.shape == (16, 32) and block.mlp.c_proj.weight.shape == (32, 16)
    assert block.attn.c_attn.weight.shape == (16, 24) and block.attn.c_proj.weight.shape == (8, 16)
    # GPT-2's own number, which no config names
    block.attn.split_size = model.transformer.h[1].attn.split_size = 8
    assert torch.allclose(model(ids).logits, before, atol=1e-10)


# -- layer reduction -------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 2)


REDUCED = {
    "layer_reduction": {
        "enabled": True, "keep_number_layer": 2, "module_name_prefix": "layer", "teacher_layer": [1, 3],
        "other_module_name": ["head"],
    }
}  # fmt: skip


def test_a_student_has_its_teachers_layers(clean_ds: None) -> None:
    teacher = Stack(4)
    student = Stack(2)
    init_compression(student, config(REDUCED), teacher_model=teacher)
    for mine, theirs in (
        (student.layer[0], teacher.layer[1]),
        (student.layer[1], teacher.layer[3]),
    ):
        assert torch.equal(mine.weight, theirs.weight) and torch.equal(mine.bias, theirs.bias)  # type: ignore[arg-type]
    assert torch.equal(student.head.weight, teacher.head.weight)
    other = student_initialization(Stack(2), nn.Sequential(teacher)[0], config(REDUCED))
    assert torch.equal(
        other.get_parameter("layer.1.weight"), student.get_parameter("layer.1.weight")
    )
    with pytest.raises(UsageError, match="pass its teacher"):
        init_compression(Stack(2), config(REDUCED))
    import ds_core

    with pytest.raises(ConfigError, match="needs a teacher"):
        ds_core.initialize(model=Stack(2), config=config(REDUCED))


def test_a_student_that_does_not_fit() -> None:
    small = Stack(2)
    small.head = nn.Linear(4, 3)
    before = small.layer[0].weight.clone()  # type: ignore[operator]
    with pytest.raises(ConfigError, match="head and the teacher's head differ in bias, weight"):
        student_initialization(small, Stack(4), config(REDUCED))
    assert torch.equal(small.layer[0].weight, before)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the teacher has no module 'layer.3'"):
        student_initialization(Stack(2), Stack(3), config(REDUCED))
