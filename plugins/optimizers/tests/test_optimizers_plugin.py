"""The declaration, the models of ``optimizer.params``, and what is refused before anything
starts."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import ds_optimizers
import pytest
import torch
from ds_optimizers.plugin import OPTIMIZERS
from ds_testing import PluginConformance
from ds_testing.truth import start
from pydantic import BaseModel
from torch import nn

from ds_core.entries import resolve
from ds_core.errors import ConfigError, UsageError
from ds_core.setup.compose import compose

LOAD = {"plugins": {"load": ["ds_optimizers.plugin"]}}
NAMES = sorted(OPTIMIZERS)


class Fixed:
    """``mup.InfShape`` of a parameter that is as large as the base model's."""

    def ninf(self) -> int:
        return 0


class TestPlugin(PluginConformance):
    entry_point = "ds_optimizers.plugin"


def model_of(name: str) -> type[BaseModel]:
    model: type[BaseModel] = resolve(str(OPTIMIZERS[name].params))
    return model


def engine_of(type_: str, params: Any = None, **config: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for param in model.parameters() if type_.lower().startswith("mu") else ():
        param.infshape = Fixed()  # type: ignore[attr-defined]
    optimizer = {"type": type_, "params": params or {}}
    return start(model, clip=1.0, optimizer=optimizer, **{**LOAD, **config})


def test_every_documented_name_is_there() -> None:
    documented = (
        "Adam, AdamW, FusedAdam, CPUAdam, DeepSpeedCPUAdam, Adagrad, CPUAdagrad, Lion, CPULion, "
        "FusedLion, Lamb, "
        "FusedLamb, Muon, MuAdam, MuAdamW, MuSGD, OneBitAdam, ZeroOneAdam, OneBitLamb, SGD, "
        "Adam8bit, AdamW8bit, AdamMini, ScheduleFreeAdamW, SOAP, Shampoo, Dion, GaLore"
    )
    assert set(documented.split(", ")) <= set(OPTIMIZERS)
    for name in OPTIMIZERS:
        assert isinstance(getattr(ds_optimizers, name), type)
    assert {n for n in OPTIMIZERS if OPTIMIZERS[n].grain == "tensor"} == {
        "AdamMini",
        "Lamb",
        "FusedLamb",
    }
    assert {n for n in OPTIMIZERS if OPTIMIZERS[n].grain == "matrix"} == {
        "Muon",
        "SOAP",
        "Shampoo",
        "Dion",
        "GaLore",
    }
    assert not OPTIMIZERS["OneBitAdam"].collects and OPTIMIZERS["OneBitLamb"].collects
    assert {n for n in OPTIMIZERS if OPTIMIZERS[n].partitioner} == {
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_model_has_the_defaults_of_the_class(name: str) -> None:
    """Every parameter of the config reaches the class, under the same default."""
    parameters = inspect.signature(getattr(ds_optimizers, name)).parameters
    for key, field in model_of(name).model_fields.items():
        if key == "torch_adam":
            continue
        assert key in parameters, f"{name}({key}=) is not an argument"
        assert parameters[key].default == field.default, key


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_from_the_config_and_unknown_parameters_are_refused(name: str) -> None:
    engine = engine_of(name.upper(), {"lr": 0.05})
    x = torch.randn(2, 3)
    losses = []
    for _ in range(20):
        loss = engine(x).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < 0.9 * losses[0]
    if name not in ("Adam", "AdamW"):
        assert type(engine.optimizer).__name__ == name
    with pytest.raises(
        ConfigError, match=r"optimizer.params.lrr.*did you mean 'optimizer.params.lr'"
    ):
        engine_of(name, {"lrr": 1})
    with pytest.raises(ConfigError, match="max_grad_norm.*gradient_clipping"):
        engine_of(name, {"max_grad_norm": 1.0})


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("FusedAdam", {"amsgrad": True}, "amsgrad"),
        ("AdamW", {"adam_w_mode": False}, "adam_w_mode"),
        ("Lamb", {"min_coeff": 3, "max_coeff": 2}, "min_coeff 3"),
        ("Muon", {"ns_method": "cubic"}, "ns_method"),
        ("SGD", {"nesterov": True}, "nesterov needs momentum"),
        ("OneBitAdam", {"comm_backend_name": "mpi"}, "comm_backend_name"),
        ("OneBitLamb", {"cuda_aware": True}, "cuda_aware"),
        ("ZeroOneAdam", {"amsgrad": True}, "amsgrad"),
        ("Adam", {"betas": [0.9, 1.0]}, "betas"),
        ("Adam", {"torch_adam": True, "bias_correction": False}, "torch's Adam always corrects"),
        ("Lion", {"lr": -1}, "lr"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_of(name, params)


def test_the_transport_of_the_1_bit_family_is_noted() -> None:
    params = {"comm_backend_name": "compressed"}
    (note,) = compose({"optimizer": {"type": "OneBitAdam", "params": params}}).notes
    assert str(note).startswith("optimizer.params.comm_backend_name: has no effect: ")


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_arguments_of_deepspeed_s_without_effect(
    name: str, caplog: pytest.LogCaptureFixture, clean_ds: None
) -> None:
    assert not compose({"optimizer": {"type": name, "params": {"bias_correction": True}}}).notes
    (note,) = compose({"optimizer": {"type": name, "params": {"bias_correction": False}}}).notes
    assert str(note).startswith("optimizer.params.bias_correction: has no effect: ")
    given = [nn.Parameter(torch.zeros(2))]
    with caplog.at_level("INFO", "ds_optimizers"):
        for _ in range(2):
            optimizer = getattr(ds_optimizers, name)(given, object(), 0.5)
    assert caplog.messages == [
        "deepspeed= of a 1-bit optimizer has no effect: the engine connects by itself"
    ]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_torch_serves_where_it_is_asked_for() -> None:
    assert type(engine_of("Adam", {"torch_adam": True}).optimizer) is torch.optim.AdamW
    assert (
        type(engine_of("Adam", {"amsgrad": True, "adam_w_mode": False}).optimizer)
        is torch.optim.Adam
    )
    assert type(engine_of("torch.optim.RMSprop", {"alpha": 0.9}).optimizer) is torch.optim.RMSprop
    assert type(engine_of("nadam").optimizer) is torch.optim.NAdam


def test_classes_refuse_what_the_documents_say() -> None:
    params = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(RuntimeError, match="AMSGrad"):
        ds_optimizers.FusedAdam(params, amsgrad=True)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        ds_optimizers.FusedLamb(params, amsgrad=True)
    with pytest.raises(ValueError, match="gradient_clipping"):
        ds_optimizers.FusedLamb(params, max_grad_norm=1.0)
    with pytest.raises(UsageError, match="on the CPU.*is on meta"):
        ds_optimizers.DeepSpeedCPUAdam([nn.Parameter(torch.zeros(2, device="meta"))])
    with pytest.raises(UsageError, match="use_muon"):
        ds_optimizers.Muon(params)
    sparse = nn.Embedding(3, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    for make in (ds_optimizers.AdamW, ds_optimizers.OneBitAdam):
        with pytest.raises(UsageError, match="sparse"):
            make(sparse.parameters()).step()


@pytest.mark.parametrize(
    "name", ["AdamW", "DeepSpeedCPUAdam", "Adagrad", "Lion", "FusedLamb", "SGD", "Muon"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_goes_on_as_the_original_does(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 4, dtype=dtype)) for _ in range(3)]
    given: Any = [{"params": params, "use_muon": True}] if name == "Muon" else params
    options = {"momentum": 0.9} if name == "SGD" else {}
    if name in ("AdamW", "DeepSpeedCPUAdam"):
        options["fp32_optimizer_states"] = False
    optimizer = getattr(ds_optimizers, name)(given, lr=0.01, **options)

    def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in params[: 1 + seed]:
            param.grad = torch.randn(4, 4, generator=generator).to(dtype)
        optimizer.step()

    step(params, optimizer, 0)
    others, other = copy.deepcopy((params, optimizer))
    for seed in (1, 2):
        step(params, optimizer, seed)
        assert not all(torch.equal(a, b) for a, b in zip(params, others, strict=True)), (
            "the copy is the original"
        )
        step(others, other, seed)
        for a, b in zip(params, others, strict=True):
            assert torch.equal(a, b)
            for key, value in optimizer.state[a].items():
                assert torch.equal(value, other.state[b][key]), key
                assert value.dtype == other.state[b][key].dtype


def test_what_compresses_is_not_copied() -> None:
    optimizer = ds_optimizers.OneBitAdam([nn.Parameter(torch.zeros(2))])
    with pytest.raises(UsageError, match="OneBitAdam cannot be copied"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("name", ["Lamb", "FusedLamb", "OneBitLamb"])
def test_lamb_needs_a_dynamic_loss_scale(name: str) -> None:
    with pytest.raises(ConfigError, match=r"fp16.loss_scale: is 128.*dynamic"):
        engine_of(name, fp16={"enabled": True, "loss_scale": 128})
    engine_of(name, fp16={"enabled": True})
    engine_of("Adam", fp16={"enabled": True, "loss_scale": 128})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package.Adam", "No module named 'no_such_package'"),
        ("torch.optim.NoSuch", "NoSuch"),
        ("torch.optim.LBFGS", "closure"),
        ("torch.version.cuda", "name a class"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_is_refused(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_of(path)
