"""What the prose around the code blocks of a page takes for granted: run before the page's first
block.

A page that is not named here has nothing but an empty folder and one process.
"""

from __future__ import annotations

WORLDS = {
    "docs/how-it-works.md": 2,
    "docs/moe.md": 2,
    "docs/pipeline.md": 2,
    "docs/recipes.md": 2,
    "plugins/pipeline/README.md": 2,
}
"""Page -> how many ranks run it, where it is not one."""

SLOW = {"docs/autoep.md"}
"""Pages that take more than a few seconds: they run in the slow tests."""

TORCH = """
import torch
from torch import nn

import ds_core

torch.manual_seed(0)
"""

ENGINE = (
    TORCH
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)

def make(**more):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **more}
    return ds_core.initialize(model=Net(), config=config)[0]

x, y = torch.randn(2, 4), torch.randn(2, 1)
data = dataset = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
engine = make()
model = engine.module
layer = model.layer
"""
)

CONFIG_FILE = """
import json, pathlib

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
pathlib.Path("ds_config.json").write_text(json.dumps(config))
"""

DEEPSPEED_CHECKPOINT = """
from ds_checkpoint_deepspeed import export_deepspeed

engine.backward(engine(x, y))
engine.step()
engine.save_checkpoint("other")
export_deepspeed("other", "deepspeed_runs/global_step1000")
"""

DCP_CHECKPOINT = """
from ds_checkpoint.formats.convert import convert

engine.backward(engine(x, y))
engine.step()
engine.save_checkpoint("runs/a")
convert("runs/a", "titan/checkpoint/step-1000", "dcp")
"""

TINY_LLAMA = """
import pathlib
import tokenizers, torch, transformers
import ds_core

torch.manual_seed(0)
tiny = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, eos_token_id=1, pad_token_id=0)
model = transformers.LlamaForCausalLM(tiny)
"""

SETUPS = {
    "docs/hybrid-engine.md": TINY_LLAMA
    + """
batches = [{"input_ids": torch.randint(2, 64, (2, 4))} for _ in range(2)]

def reward(texts):
    return (texts == 7).float().mean(1)

def loss_of(engine, texts, rewards):
    logits = engine(input_ids=texts).logits[:, :-1].log_softmax(-1)
    chosen = logits.gather(-1, texts[:, 1:, None]).squeeze(-1).mean(1)
    return -(chosen * (rewards - rewards.mean())).mean()
""",
    "docs/how-it-works.md": TORCH,
    "docs/inference.md": TINY_LLAMA
    + """
from transformers import AutoConfig

texts = ["1 2 3", "4 5"]

words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
folder = "models/SmolLM2-135M-Instruct"
model.save_pretrained(folder)
transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(folder)
""",
    "docs/migrate.md": CONFIG_FILE,
    "docs/monitors.md": ENGINE + "loss = engine(x, y)\n",
    "docs/training.md": ENGINE
    + CONFIG_FILE
    + """
from itertools import cycle

engine.destroy()
iterator = cycle([(x, y)])
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
actor, critic = (ds_core.initialize(model=nn.Linear(4, 1), config=config)[0] for _ in range(2))
""",
    "docs/recipes.md": TORCH
    + CONFIG_FILE.replace(
        "json.dumps(config)", 'json.dumps({**config, "zero_optimization": {"stage": 3}})'
    )
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.head(self.body(x).relu()) - y).square().mean()

data, held_out = (torch.utils.data.TensorDataset(torch.randn(n, 4), torch.randn(n, 1)) for n in (16, 5))
""",
    "docs/checkpoints.md": ENGINE
    + CONFIG_FILE
    + DEEPSPEED_CHECKPOINT
    + """
from ds_checkpoint.formats.convert import convert

convert("other", "titan/checkpoint/step-1000", "dcp")
pathlib.Path("config.json").write_text("{}")
""",
    "docs/moe.md": TORCH + CONFIG_FILE,
    "docs/larger-than-memory.md": TORCH,
    "docs/data-sampling.md": TORCH
    + """
texts = [{"input_ids": torch.randint(0, 50, (n,))} for n in range(4, 24)]
curriculum = {"seqlen": {"clustering_type": "single_cluster", "min_difficulty": 8, "max_difficulty": 1024,
    "schedule_type": "custom"}}
sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": curriculum}}
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "data_efficiency": {"enabled": True, "data_sampling": sampling}}
engine, *_ = ds_core.initialize(model=nn.Linear(4, 1), config=config)
""",
    "docs/long-sequences.md": TORCH
    + """
import json, pathlib
import transformers

ids = torch.randint(64, (1, 32))
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=16, intermediate_size=32, vocab_size=64,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2))
""",
    "docs/pipeline.md": TORCH
    + CONFIG_FILE
    + """
from ds_pipeline import LayerSpec, PipelineModule

steps = 2
dataset = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.randint(10, (8,)))
""",
    "docs/autoep.md": TORCH
    + """
import json, pathlib
import transformers

small = transformers.MixtralConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=4, vocab_size=32)
transformers.MixtralForCausalLM(small).save_pretrained("model")
name = "model"
engine = ds_core.initialize(model=transformers.MixtralForCausalLM(small), config={"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}})[0]
engine.save_checkpoint("checkpoints")
engine.destroy()
pathlib.Path("config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "expert_parallel": {"enabled": True, "autoep_size": 1}}))
""",
    "plugins/access/README.md": ENGINE + "loss = engine(x, y)\n",
    "plugins/checkpoint/README.md": ENGINE,
    "plugins/checkpoint_dcp/README.md": ENGINE + DCP_CHECKPOINT,
    "plugins/checkpoint_deepspeed/README.md": ENGINE + DEEPSPEED_CHECKPOINT,
    "plugins/checkpoint_object/README.md": ENGINE,
    "plugins/checkpoint_peer/README.md": ENGINE,
    "plugins/evaluation/README.md": TORCH
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs, labels):
        return self.layer(inputs)

validation_data = [{"inputs": torch.randn(4), "labels": i % 3} for i in range(7)]
validation_data = torch.utils.data.ConcatDataset([validation_data])
engine = ds_core.initialize(model=Net(), config={"train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})[0]
""",
    "plugins/elasticity/README.md": ENGINE
    + """
import json, pathlib

sections = {
    "elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [4]},
    "autosave": {"folder": "runs/a", "every": 500},
}
pathlib.Path("ds_config.json").write_text(json.dumps({**sections, "optimizer": {"type": "AdamW"}}))
""",
    "plugins/moe/README.md": TORCH,
    "plugins/tensor_parallel/README.md": TORCH + "from torch.nn import functional as F\n",
    "plugins/pipeline/README.md": TORCH
    + """
from itertools import repeat

vocabulary, width = 32, 8

class Block(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

def loss(out, labels):
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
iterator = repeat((torch.randint(32, (2, 4)), torch.randint(32, (2, 4))))
""",
    "plugins/activation_checkpointing/README.md": TORCH
    + """
def block(hidden, mask, scale):
    return torch.tanh(hidden * mask * scale)

hidden, mask = torch.randn(2, 4, requires_grad=True), torch.ones(2, 4)
""",
    "plugins/run_state/README.md": ENGINE
    + """
from ds_core.engine.checkpointer import LoadOptions

seed, tp_index, dropout, hidden = 5, 0, nn.Dropout(0.5), torch.ones(4)

options = LoadOptions()

class Memory:
    def __init__(self, pieces):
        self.rows = {piece.name: (piece.values().detach().flatten().clone(), tuple(piece.shape)) for piece in pieces}

    def names(self):
        return list(self.rows)

    def shape(self, name):
        return self.rows[name][1]

    def read(self, name, start=0, stop=None, *, into=None):
        return self.rows[name][0][start:stop].clone()

read_back = Memory
""",
    "plugins/state_stores/README.md": ENGINE
    + "ctx, plugins, weight = engine.ctx, engine.ctx.plugins, layer.weight\n"
    + "accelerator, activation = ctx.accelerator, torch.ones(4)\n",
    "plugins/zero/README.md": TORCH
    + """
import copy

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))

decay = 0.9
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
          "zero_optimization": {"stage": 3}}
ds_core.init_distributed()
""",
    "ops/comm_gloo/README.md": TORCH + "model = nn.Linear(4, 1)\nopen_mine = None\n",
    "ops/cuda/README.md": TORCH
    + "hidden = torch.randn(2, 8, 256)\nattention_mask = torch.zeros(2, 1, 1, 8)\n",
    "plugins/cli/README.md": "from ds_core.entries import CommandEntry\n",
}
"""Page -> Python that makes what its blocks use."""
