"""`initialize`: models, optimizers, schedules and configs in any usual form, and what is refused."""

from __future__ import annotations

import argparse
import functools
import logging
import re

import pytest
import torch
from ds_testing.truth import same
from tiny_engine import BASE, OWN, Squares, alone, data, initialized, model
from torch import nn

import ds_core
from ds_core.config import Batch
from ds_core.errors import ConfigError, DSError, UsageError

pytestmark = pytest.mark.usefixtures("clean_ds")


# -- initialize ------------------------------------------------------------------------------------


def test_train_batch_and_eval_batch():
    torch.manual_seed(0)
    engine, *_ = initialized({"gradient_accumulation_steps": 2}, net=Squares())
    xs = data(4)
    first = engine.eval_batch(iter(xs[:2]))
    losses = [engine.train_batch(it) for it in [iter(xs)] for _ in range(2)]
    assert first.item() == pytest.approx(losses[0].item(), rel=1e-6)
    assert engine.module.training
    same(engine.module.net, alone(xs, 2))
    with pytest.raises(StopIteration):
        engine.train_batch(iter(xs[:1]))
    assert engine.global_steps == 2
    loss, outputs = engine.eval_batch(iter(xs), return_logits=True, num_micro_batches=3)
    assert len(outputs) == 3
    assert loss.item() == pytest.approx(sum(o.item() for o in outputs) / 3)
    with torch.no_grad(), pytest.raises(UsageError, match="no_grad"):
        engine.train_batch(iter(xs))


def test_train_batch_uses_the_engines_own_loader():
    engine, _, loader, _ = initialized(
        net=Squares(), training_data=[torch.randn(4) for _ in range(5)]
    )
    for _ in range(7):
        engine.train_batch()
    assert len(loader) == 3
    assert engine.global_steps == 7
    assert loader.epoch == 2


@pytest.mark.parametrize("output", [lambda x: (x, 1), lambda x: {"loss": x}, lambda x: x])
def test_the_loss_may_stand_anywhere_usual_in_the_output(output):
    class Net(Squares):
        def forward(self, x):
            return output(super().forward(x))

    engine, *_ = initialized(net=Net())
    assert engine.train_batch(iter(data(1))).dim() == 0


def test_a_module_without_a_loss_is_told_so():
    engine, *_ = initialized()
    with pytest.raises(UsageError, match="scalar loss"):
        engine.train_batch(iter(data(1)))


def test_optimizer_and_scheduler_may_be_objects_or_functions():
    net = model()
    given = torch.optim.SGD(net.parameters(), lr=0.5)
    engine, optimizer, _, scheduler = initialized(
        net=net,
        optimizer=given,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    assert optimizer is given
    assert scheduler.optimizer is given
    engine.backward(engine(data(1)[0]).sum())
    engine.step()
    assert engine.get_lr() == [0.25]
    _, made, *_ = initialized(optimizer=lambda groups: torch.optim.Adagrad(groups, lr=0.3))
    assert isinstance(made, torch.optim.Adagrad)


def test_client_optimizer_under_bf16_holds_masters():
    net = model()
    given = torch.optim.AdamW(net.parameters(), lr=0.1)
    engine, optimizer, *_ = initialized({"bf16": {"enabled": True}}, net=net, optimizer=given)
    engine.backward(engine(data(1)[0].bfloat16()).float().sum())
    engine.step()
    assert all(p.dtype == torch.float32 for g in optimizer.param_groups for p in g["params"])
    assert all(p.dtype == torch.bfloat16 for p in net.parameters())


def test_initialize_errors_say_what_is_missing(monkeypatch):
    with pytest.raises(UsageError, match="needs a model"):
        ds_core.initialize(config=BASE)
    with pytest.raises(UsageError, match="nn.Module"):
        ds_core.initialize(model=3, config=BASE)
    with pytest.raises(ConfigError, match="no config"):
        ds_core.initialize(model=model())
    with pytest.raises(ConfigError, match="config and config_params are both given"):
        ds_core.initialize(model=model(), config=BASE, config_params=BASE)
    with pytest.raises(UsageError, match="optimizer must be"):
        initialized(optimizer=7)
    with pytest.raises(UsageError, match="lr_scheduler must have"):
        initialized(lr_scheduler=7)
    net = model()
    with pytest.raises(UsageError, match="list it once"):
        initialized(
            net=net,
            model_parameters=[{"params": list(net.parameters())}, {"params": [net[0].weight]}],
        )
    with pytest.raises(UsageError, match="not a parameter of the model"):
        initialized(model_parameters=list(model().parameters()))
    with pytest.raises(ConfigError, match="needs an optimizer"):
        ds_core.initialize(
            model=model(),
            config={
                "train_batch_size": 1,
                "scheduler": {"type": "StepLR", "params": {"step_size": 1}},
            },
        )
    with pytest.raises(ConfigError, match="data parallel size 3"):
        initialized({"data_parallel_size": 3})
    with pytest.raises(ConfigError, match="data parallel size 2, but this run has 1"):
        initialized(mesh_param=(2, 1))
    # which mesh_param stands for
    with pytest.raises(ConfigError, match="sequence_parallel_size|sp"):
        initialized(mesh_param=(1, 2))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match=r"args.local_rank is 1"):
        initialized(args=argparse.Namespace(local_rank=1))
    with pytest.raises(UsageError, match=r"args.local_rank is 1"):
        initialized(args={"local_rank": 1})


def test_config_sources_are_equivalent(tmp_path):
    import base64
    import json

    text = json.dumps(BASE)
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    args = argparse.Namespace(deepspeed=True, deepspeed_config=str(path))
    for kwargs in (
        {"config": BASE},
        {"config": str(path)},
        {"config_params": path},
        {"config": base64.urlsafe_b64encode(text.encode()).decode()},
        {"args": args},
        {"args": {"deepspeed_config": str(path), "local_rank": 0}},
    ):
        engine, *_ = ds_core.initialize(model=model(), **kwargs)
        assert engine.ctx.batch == Batch(2, 2, 1)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "Adm"}, ["optimizer.type", "'Adm'", "'Adam'"]),
        (
            {"type": "Lamb"},
            [
                "served by dscore-optimizers",
                "pip install -c dist/constraints.txt dscore-optimizers",
            ],
        ),
        ({"type": "no_such_package.Adam"}, ["optimizer.type", "No module named 'no_such_package'"]),
        (
            {"type": "AdamW", "params": {"lrr": 1}},
            ["optimizer.params.lrr", "did you mean 'optimizer.params.lr'"],
        ),
        ({"type": "AdamW", "params": {"lr": "fast"}}, ["optimizer.params.lr"]),
        ({"type": "AdamW", "params": {"lr": True}}, ["optimizer.params.lr"]),
        (
            {"type": "AdamW", "params": {"max_grad_norm": 1}},
            ["optimizer.params.max_grad_norm", "gradient_clipping"],
        ),
        ({"type": "RMSprop", "params": {"alhpa": 1}}, ["optimizer.params.alhpa", "'alpha'"]),
        (
            {"type": "SGD", "params": {"momentum": "much"}},
            ["optimizer.params.momentum", "not a number"],
        ),
    ],
)
def test_a_wrong_optimizer_section_names_the_key(section, words):
    with pytest.raises(ConfigError) as caught:
        initialized({"optimizer": section, **OWN})
    for word in words:
        assert word in str(caught.value)


def test_any_torch_optimizer_and_scheduler_serve_by_name():
    engine, optimizer, _, scheduler = initialized(
        {
            "optimizer": {"type": "rmsprop", "params": {"lr": 0.1, "alpha": 0.9}},
            "scheduler": {"type": "MultiplicativeLR", "params": {"lr_lambda": 1}},
        }
        | {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}}
    )
    assert type(optimizer).__name__ == "RMSprop"
    assert type(scheduler).__name__ == "CosineAnnealingLR"
    assert engine.get_lr() == [0.1]


def test_adam_is_decoupled_unless_told_otherwise():
    _, decoupled, *_ = initialized({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, **OWN})
    _, coupled, *_ = initialized(
        {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}, **OWN}
    )
    assert type(decoupled).__name__ == "AdamW"
    assert type(coupled).__name__ == "Adam"
    assert decoupled.defaults["fused"]


def test_several_engines_share_one_loss():
    a, *_ = initialized(net=model(0))
    b, *_ = initialized(net=model(1))
    x = data(1)[0]
    loss = (a(x) * b(x)).mean()
    loss.backward()
    for engine in (a, b):
        engine.step()
        engine.optimizer.zero_grad()
    p = model(0)
    q = model(1)
    (p(x) * q(x)).mean().backward()
    for net in (p, q):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    same(a.module, p)
    same(b.module, q)


def test_unknown_attributes_are_the_modules():
    engine, *_ = initialized()
    assert [n for n, _ in engine.named_parameters()] == [n for n, _ in model().named_parameters()]
    with pytest.raises(
        AttributeError,
        match="neither the engine nor its module, a Sequential, has .*'no_such_thing'$",
    ):
        _ = engine.no_such_thing
    with pytest.raises(AttributeError, match=r"'cur_scale': it is engine.loss_scale$"):
        _ = engine.cur_scale
    with pytest.raises(
        AttributeError, match=r"'vocabulary_size': it is engine.config.core.vocabulary_size$"
    ):
        _ = engine.vocabulary_size


class Failing(nn.Linear):
    @property
    def broken(self):
        return self.inner

    def __getattr__(self, name):
        if name == "mine":
            raise AttributeError("words of the model's own")
        return super().__getattr__(name)


def test_errors_of_the_module_s_own_attributes_stay_its_own():
    engine, *_ = initialized(net=Failing(4, 2))
    with pytest.raises(AttributeError, match="^words of the model's own$"):
        _ = engine.mine
    with pytest.raises(AttributeError, match="^'Failing' object has no attribute"):
        _ = engine.broken


def test_what_replaces_deepspeed_s_names_is_there():
    from ds_core.catalogue import _catalogue

    engine, *_ = initialized({"scheduler": {"type": "WarmupLR"}})
    for name, instead in _catalogue()["engine"].items():
        with pytest.raises(AttributeError, match=f"'{name}': "):
            getattr(engine, name)
        for path in re.findall(r"\bengine\.([\w.]*\w)", instead):
            functools.reduce(getattr, path.split("."), engine)


@pytest.mark.parametrize("how", ["object", "function", "config"])
def test_an_optimizer_whose_step_needs_a_closure_is_refused(how):
    net = model()
    given = {
        "object": torch.optim.LBFGS(net.parameters()),
        "function": torch.optim.LBFGS,
        "config": None,
    }[how]
    config = {"optimizer": {"type": "torch.optim.LBFGS"}} if how == "config" else {}
    with pytest.raises(
        (UsageError, ConfigError), match="LBFGS.* needs a? ?closure.*, (and|which) .* give"
    ):
        initialized(config, net, optimizer=given)


def test_an_optimizer_that_has_a_schedule_of_torchs_is_accepted():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # puts a function into optimizer.step
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = initialized({}, net, optimizer=optimizer, lr_scheduler=schedule)
    assert engine.lr_scheduler is schedule


def test_vocabulary_log_level_dump_and_progress(caplog):
    with caplog.at_level(logging.INFO, "ds_core"):
        switches = dict.fromkeys(("dump_state", "memory_breakdown", "wall_clock_breakdown"), True)
        engine, *_ = initialized({"vocabulary_size": 50257, "steps_per_print": 2, **switches})
        for x in data(4):
            engine.backward(engine(x).square().mean())
            engine.step()
    assert "50264" in caplog.text
    assert caplog.text.count("samples/s") == 2
    assert "ms: forward" in caplog.text
    assert caplog.text.count("memory after backward_inner") == 2
    assert "GiB at peak" in caplog.text
    assert "mesh {'dp': 1}" in caplog.text


def test_every_error_of_ours_is_a_dserror():
    from ds_core import errors

    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, DSError)
