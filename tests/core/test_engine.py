"""The engine in one process: what the documents promise of forward, backward, step and the
counters.
"""

from __future__ import annotations

import logging

import pytest
import torch
from ds_testing.truth import same
from tiny_engine import Squares, alone, data, initialized, model
from torch import nn

from ds_core.config import Batch
from ds_core.errors import ConfigError, UsageError

pytestmark = pytest.mark.usefixtures("clean_ds")


# -- one process is plain torch --------------------------------------------------------------------


@pytest.mark.parametrize("gas", [1, 3])
def test_one_process_is_bit_identical_to_plain_torch(gas):
    engine, *_ = initialized({"gradient_accumulation_steps": gas})
    xs = data(6)
    for x in xs:
        engine.backward(engine(x).square().mean())
        engine.step()
    same(engine.module, alone(xs, gas))
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (6, 6 // gas, 6 * 2)


@pytest.mark.parametrize("gas", [1, 3])
def test_plain_loss_backward_gives_the_same_gradients(gas):
    engine, *_ = initialized({"gradient_accumulation_steps": gas, "gradient_clipping": 0.05})
    xs = data(6)
    for x in xs:
        engine.scale(engine(x).square().mean()).backward()
        engine.step()
    same(engine.module, alone(xs, gas, clip=0.05), 1e-6)


def test_backward_returns_the_loss_divided_by_accumulation_steps():
    engine, *_ = initialized({"gradient_accumulation_steps": 4})
    loss = engine(data(1)[0]).square().mean()
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
    assert engine.backward(engine(data(1)[0]).sum(), scale_wrt_gas=False).item() != 0


def test_the_caller_may_divide_by_accumulation_steps_himself():
    engine, *_ = initialized({"gradient_accumulation_steps": 2})
    xs = data(4)
    for x in xs:
        engine.backward(engine(x).square().mean() / 2, scale_wrt_gas=False)
        engine.step()
    same(engine.module, alone(xs, 2), 1e-7)


def test_nothing_is_talked_about_in_one_process(monkeypatch):
    """World size 1 calls no collective of torch's."""
    import torch.distributed as dist

    def refuse(*a, **k):
        raise AssertionError("a collective was called at world size 1")

    for name in (
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "barrier",
        "all_to_all_single",
    ):
        monkeypatch.setattr(dist, name, refuse)
    engine, *_ = initialized({"gradient_clipping": 1.0})
    batches = iter(data(2))
    for x in batches:
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 2


# -- boundaries ------------------------------------------------------------------------------------


def test_the_boundary_is_counted_or_forced():
    engine, *_ = initialized({"gradient_accumulation_steps": 2})
    seen = []
    for x in data(4):
        seen.append(engine.is_gradient_accumulation_boundary())
        engine.backward(engine(x).square().mean())
        engine.step()
    assert seen == [False, True, False, True]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(data(1)[0]).square().mean())
    engine.step()
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(data(1)[0]).square().mean())
    engine.step()
    assert engine.global_steps == 3
    assert not engine.was_step_applied()


def test_unmanaged_accumulation_leaves_it_to_the_caller():
    engine, *_ = initialized(
        {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 1}
    )
    x, y = data(2)
    engine.backward(engine(x).square().mean())
    engine.backward(engine(y).square().mean())
    engine.step()
    net = model()
    (net(x).square().mean() + net(y).square().mean()).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    same(engine.module, net)


def test_no_sync_rules():
    engine, *_ = initialized()
    with engine.no_sync():
        with pytest.raises(UsageError, match="inside no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="nested"), engine.no_sync():
            pass
    with engine.coalesce_grad_reduction():
        with pytest.raises(UsageError, match="coalesce"):
            engine.step()
        with pytest.raises(AssertionError), engine.no_sync():
            pass
        with pytest.raises(UsageError, match="nested"), engine.coalesce_grad_reduction():
            pass


def test_a_window_cannot_mix_both_backwards():
    engine, *_ = initialized({"gradient_accumulation_steps": 2})
    x, y = data(2)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine(y).square().mean().backward()
    with pytest.raises(UsageError, match=r"found no engine\.backward"):
        engine.step()
    other, *_ = initialized({"gradient_accumulation_steps": 2})
    other(x).square().mean().backward()
    other.step()
    with pytest.raises(UsageError, match=r"came both from engine\.backward"):
        other.backward(other(y).square().mean())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda e: e(data(1)[0]), r"scalar tensor, got a tensor of shape \(2, 2\)"),
        (lambda e: 3.0, "got float"),
        (lambda e: e(data(1)[0]).sum().detach(), "no graph"),
    ],
)
def test_a_loss_that_cannot_be_learnt_from_is_refused(loss, words):
    engine, *_ = initialized()
    with pytest.raises(UsageError, match=words):
        engine.backward(loss(engine))


# -- batch sizes -----------------------------------------------------------------------------------


def test_batch_setters_change_accumulation_or_micro():
    engine, *_ = initialized({"gradient_accumulation_steps": 2})
    assert engine.ctx.batch == Batch(4, 2, 2)
    engine.set_train_batch_size(8)
    assert engine.ctx.batch == Batch(8, 2, 4)
    with pytest.raises(ValueError, match="7"):
        engine.set_train_batch_size(7)
    engine.set_train_micro_batch_size(3)
    assert engine.ctx.batch == Batch(12, 3, 4)


def test_a_new_micro_batch_size_reaches_the_engines_own_loader():
    class Net(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    dataset = [torch.full((4,), float(i)) for i in range(24)]
    engine, _, loader, _ = initialized(net=Net(4, 2), training_data=dataset)
    engine.train_batch(_losses_of(engine, loader, seen := []))
    engine.set_train_micro_batch_size(4)
    engine.train_batch(_losses_of(engine, loader, seen))
    assert [len(b) for b in seen] == [2, 4]
    assert len(loader) == 6
    engine.set_train_micro_batch_size(3)
    engine.train_batch(_losses_of(engine, loader, seen))
    assert len(torch.cat(seen)[:, 0].unique()) == 6, (
        "goes on at the same sample, rounded down: 0:2, 0:4, 3:6"
    )


def _losses_of(engine, loader, seen):
    """The loader's batches, taken note of."""
    for batch in loader:
        seen.append(batch)
        yield batch


# -- what is reported ------------------------------------------------------------------------------


def test_the_reported_loss_is_what_was_differentiated(caplog):
    xs = data(2)
    with caplog.at_level(logging.INFO, "ds_core"):
        engine, *_ = initialized({"steps_per_print": 1, "gradient_accumulation_steps": 2})
        total = 0.0
        for x in xs:
            for factor in (1.0, 3.0):  # two losses in each micro-batch
                loss = engine(x).square().mean() * factor
                total += loss.item() / 2
                engine.backward(loss)
            engine.step()
    assert f"loss {total:.4f}" in caplog.text


def test_zero_grad_drops_gradients_outside_the_optimizer_too():
    net = model()
    engine, *_ = initialized(net=net, model_parameters=list(net.parameters())[:1])
    engine.backward(engine(data(1)[0]).square().mean())
    assert all(p.grad is not None for p in net.parameters())
    engine.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_parameters_added_to_the_optimizer_later_are_refused():
    engine, optimizer, *_ = initialized()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    engine.backward(engine(data(1)[0]).sum())
    with pytest.raises(UsageError, match="added to the optimizer after initialize"):
        engine.step()


def test_loading_in_mid_window_drops_half_a_gradient(tmp_path):
    engine, *_ = initialized({"gradient_accumulation_steps": 2})
    engine.save_checkpoint(str(tmp_path))
    engine.backward(engine(data(1)[0]).sum())
    engine.step()
    engine.load_checkpoint(str(tmp_path))
    assert all(p.grad is None for p in engine.module.parameters())
    engine(data(1)[0]).sum().backward()
    engine.step()
    assert engine.micro_steps == 1


def test_evaluation_restores_the_mode_of_every_module():
    net = Squares()
    net.net[1].eval()
    engine, *_ = initialized(net=net)
    engine.eval_batch(iter(data(1)))
    assert [net.training, net.net[0].training, net.net[1].training] == [True, True, False]


def test_nothing_to_train_is_an_error():
    with pytest.raises(UsageError, match="nothing to train"):
        initialized(model_parameters=[])
    frozen = model().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        initialized(net=frozen)
    net = model()
    with pytest.raises(UsageError, match="other tensors than it was given"):
        initialized(
            {"bf16": {"enabled": True}},
            net=net,
            optimizer=lambda _: torch.optim.SGD(net.parameters(), lr=1),
        )


def test_a_state_dict_loaded_into_the_module_reaches_the_masters():
    engine, *_ = initialized({"bf16": {"enabled": True}})
    engine.module.load_state_dict(
        {k: torch.full_like(v, 3.0) for k, v in engine.module.state_dict().items()}
    )
    engine.backward(engine(data(1)[0].bfloat16()).float().sum() * 0)
    engine.step()
    assert all(torch.all(p == 3.0) for p in engine.module.parameters())


def test_model_parameters_in_any_usual_shape():
    net = model()
    _, optimizer, *_ = initialized(net=net, model_parameters=[{"params": net.named_parameters()}])
    assert len(optimizer.param_groups[0]["params"]) == 4
    for wrong in ({"params": []}, next(model().parameters())):
        with pytest.raises(UsageError, match="give a list"):
            initialized(model_parameters=wrong)


def test_a_schedule_that_needs_a_metric_is_given_one_or_says_so():
    config = {"scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}}}
    engine, *_ = initialized(config)
    for _ in range(3):
        engine.backward(engine(data(1)[0]).sum())
        engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.get_lr()[0] < 0.1
    before = [p.clone() for p in engine.module.parameters()]
    engine.backward(engine(data(1)[0]).sum())
    with pytest.raises(UsageError, match="needs metrics"):
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["LBFGS", "sparseadam"])
def test_optimizers_that_cannot_work_are_refused_at_once(name):
    with pytest.raises(ConfigError, match=r"optimizer\.type"):
        initialized({"optimizer": {"type": name}})
