"""Runs of small models, recorded and replayed, for the tests of dscore-verify."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ds_verify.comparing import Report, compare_folders
from ds_verify.runs import replay_overrides
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between tied embeddings, with a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(30, 8)
        self.shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(self.tok(x))
        for block in self.blocks:
            h = block(h)
        return self.head(self.shared(h))  # type: ignore[no-any-return]


class NetWithLoss(Net):
    """Gives its loss beside the logits of which it is made, as models of transformers do."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def run_script(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """A user's script, but for the section, which ``dscore verify`` adds from outside."""
    import ds_core

    _train(ds_core.initialize, config, section)


def train_as_deepspeed(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """A script that was written for DeepSpeed."""
    import deepspeed

    _train(deepspeed.initialize, config, section)


def train_batches(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """A script whose model has the loss, and that leaves micro-batches to the engine."""
    import ds_core

    torch.manual_seed(0)
    data = torch.randint(0, 30, (64, 7))
    config = {**BASE, **config, "verify": dict(section)}
    engine, *_ = ds_core.initialize(model=NetWithLoss(), config=config, training_data=data)
    with _ending(engine):
        for _ in range(20):
            engine.train_batch()


def train_in_place(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """The loss is multiplied in place (transformers' Trainer), and another method of the model is
    called as its forward (Lightning).
    """
    import ds_core

    torch.manual_seed(0)
    config = {**BASE, **config, "verify": dict(section)}
    engine, *_ = ds_core.initialize(model=NetWithLoss(), config=config)
    module = engine.module
    plain = module.forward

    def training_step(x: Tensor) -> Any:
        module.forward = plain
        return module.forward(x)["loss"]

    data = torch.Generator().manual_seed(engine.global_rank)
    with _ending(engine):
        for _ in range(20):
            module.forward = training_step
            loss = engine(torch.randint(0, 30, (2, 7), generator=data))
            loss *= 3
            engine.backward(loss)
            engine.step()


def train_llama(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """A model of transformers."""
    from ds_testing.truth import tiny

    import ds_core

    config = {**BASE, **config, "verify": dict(section)}
    engine, *_ = ds_core.initialize(model=tiny("llama"), config=config)
    data = torch.Generator().manual_seed(engine.ctx.mesh.index("batch"))
    with _ending(engine):
        for _ in range(20):
            x = torch.randint(2, 60, (2, 9), generator=data)
            engine.backward(engine(input_ids=x, labels=x).loss)
            engine.step()


class Experts(nn.Module):
    """Blocks with a mixture of experts between tied embeddings."""

    def __init__(self, ep: int) -> None:
        from ds_moe import MoE

        super().__init__()
        self.tok = nn.Embedding(30, 8)
        expert = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.blocks = nn.ModuleList(
            MoE(8, expert, num_experts=4, ep_size=ep, k=2, capacity_factor=4.0, use_rts=False)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x)
        for block in self.blocks:
            h = h + block(h)[0]
        return h @ self.tok.weight.t()  # type: ignore[no-any-return]


def train_experts(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """Experts that are divided over the ranks, or all in one process."""
    import ds_core

    ep = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    _train(ds_core.initialize, config, section, lambda: Experts(ep))


class Divided(nn.Module):
    """A layer of attention over sequences that several ranks divide, with its loss."""

    def __init__(self) -> None:
        from ds_sequence_parallel import CrossEntropy, DistributedAttention

        super().__init__()
        self.tok = nn.Embedding(30, 8)
        self.qkv = nn.Linear(8, 24)
        self.attention = DistributedAttention(_attend)
        self.head = nn.Linear(8, 30)
        self.loss = CrossEntropy()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.tok(tokens)
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 4)).unbind(2)
        h = h + self.attention(q, k, v).flatten(2)
        return self.loss(self.head(h), labels)  # type: ignore[no-any-return]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2)


def train_divided(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """Sequences that are divided over ranks."""
    import ds_core

    torch.manual_seed(0)
    config = {**BASE, **config, "verify": dict(section)}
    engine, *_ = ds_core.initialize(model=Divided(), config=config)
    data = torch.Generator().manual_seed(engine.ctx.mesh.index("batch"))
    with _ending(engine):
        for _ in range(20):
            x = torch.randint(0, 30, (2, 9), generator=data)
            engine.backward(engine(x[:, :-1], x[:, 1:]))
            engine.step()


def _project(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train_stages(config: Mapping[str, Any], section: Mapping[str, Any]) -> None:
    """A pipeline with tied embeddings and dropout."""
    from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec

    import ds_core

    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("tok", nn.Embedding, 30, 8),
        *(LayerSpec(Block) for _ in range(4)),
        TiedLayerSpec("tok", nn.Embedding, 30, 8, forward_fn=_project),
    ]
    # What `dscore verify` gives by DS_CONFIG_OVERRIDES, which a process of a pool has not.
    given = {"stages": 2, "chunks": 1, **config.get("pipeline", {})}
    config = {**BASE, **config, "verify": dict(section)}
    model = PipelineModule(
        layers,
        num_stages=given["stages"],
        chunks=given["chunks"],
        loss_fn=_loss,
        seed_layers=True,
        partition_method="uniform",
    )
    engine, *_ = ds_core.initialize(model=model, config=config)
    data = torch.Generator().manual_seed(engine.ctx.mesh.index("batch"))

    def batches() -> Iterator[Any]:
        while True:
            x = torch.randint(0, 30, (2, 7), generator=data)
            yield x[:, :-1], x[:, 1:]

    with _ending(engine):
        for _ in range(20):
            engine.train_batch(batches())


BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


@contextlib.contextmanager
def _ending(engine: Any) -> Iterator[None]:
    """Inside, the recorder ends the program after its last step."""
    try:
        yield
    except SystemExit as end:
        assert not end.code
        engine.destroy()
        return
    raise AssertionError("the recorder ends the program after its last step")


def _train(
    initialize: Callable[..., Any],
    config: Mapping[str, Any],
    section: Mapping[str, Any],
    model: Callable[[], nn.Module] = Net,
) -> None:
    torch.manual_seed(0)
    config = {**BASE, **config, "verify": dict(section)}
    engine, *_ = initialize(model=model(), config=config)
    data = torch.Generator().manual_seed(engine.global_rank)
    with _ending(engine):
        for _ in range(20):
            x = torch.randint(0, 30, (2, 7), generator=data)
            out = engine(x[:, :-1]).flatten(0, 1).float()
            engine.backward(nn.functional.cross_entropy(out, x[:, 1:].flatten()))
            engine.step()


def compare_engines(config: Mapping[str, Any], fault: bool) -> tuple[str, list[float], int]:
    """Two engines of one process: ZeRO against none; (the first difference, weights moved, hooks)."""
    from ds_verify import compare

    import ds_core

    def engine(more: Mapping[str, Any]) -> Any:
        torch.manual_seed(0)
        own = {**BASE, **more, "verify": {"role": "compare"}}
        return ds_core.initialize(model=Net(), config=own)[0]

    ours, theirs = engine(config), engine({})
    if fault:
        # As if one layout had scaled a gradient.
        ours.module.blocks[1].up.weight.register_hook(lambda grad: grad * 1.5)
    data = torch.Generator().manual_seed(ours.global_rank)
    batches = [torch.randint(0, 30, (2, 7), generator=data) for _ in range(4)]
    before = [p.detach().clone() for e in (ours, theirs) for p in e.module.parameters()]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    report = compare(ours, theirs, batches, loss=loss)
    after = [p.detach() for e in (ours, theirs) for p in e.module.parameters()]
    moved = [float((a - b).abs().sum()) for a, b in zip(after, before, strict=True)]
    hooks = sum(len(m._forward_hooks) for m in theirs.module.modules())
    for each in (ours, theirs):
        each.destroy()
    first = report.first
    return (f"{first.kind} {first.name}" if first else "equal"), moved, hooks


def hooks_left(folder: str) -> tuple[bool, int]:
    """Whether a recorder has hooks on the model, and how many are left of them at the end."""
    import ds_core

    model = Net()
    config = {**BASE, "verify": {"folder": folder}}
    engine, *_ = ds_core.initialize(model=model, config=config)

    def count() -> int:
        modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())

    watched = count()
    engine.destroy()
    return watched > 20, count()


def verify(
    ranks: Callable[..., Any],
    folder: Path,
    config: Mapping[str, Any],
    *,
    world: int = 2,
    steps: int = 2,
    script: Callable[..., None] = run_script,
    arguments: Sequence[Any] = (),
    against: Mapping[str, Any] | None = None,
    reference_world: int = 1,
) -> Report:
    """What ``dscore verify`` does, on the ranks of a pool.

    script: is called with `arguments`, the config and the section ``verify``.
    """
    subject = folder / "subject"
    section = {"steps": steps, "folder": str(subject)}
    ranks(world, script, *arguments, config, section)
    facts = json.loads((subject / "facts.json").read_text(encoding="utf-8"))
    config = replay_overrides(facts, config, against, reference_world)
    for name in ("reference", "perturbed"):
        replay = {
            "role": "replay",
            "source": str(subject),
            "folder": str(folder / name),
            "steps": steps,
            "perturb": name == "perturbed",
        }
        ranks(reference_world, script, *arguments, config, replay)
    return compare_folders(subject, folder / "reference", folder / "perturbed")
