"""What a forward draws: it depends on nothing but what is said, is drawn again in backward, and what
cannot be so is refused.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ds_checkpoint  # noqa: F401  - needs it installed
import pytest
import torch
from dropping_models import DEALT, MICRO, Layer, Net, batch, gpt2, ids, trained
from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from ds_testing.truth import difference, same, start, train, whole_weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_core.errors import ConfigError, UsageError


def engine_of(model: nn.Module, **config: Any) -> Any:
    return start(model.double(), **{"micro": MICRO, "reproducibility": DEALT} | config)


class Own(nn.Module):
    """One linear layer, and what `forward` makes of it."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 5)
        self.drop = nn.Dropout(0.3)
        self.way = way

    def module(self, x: Tensor) -> Tensor:
        """Drops by a module."""
        out: Tensor = self.drop(self.linear(x))
        return out

    def function(self, x: Tensor) -> Tensor:
        """Drops by a function."""
        return functional.dropout(self.linear(x), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def losses_of(way: Callable[[Any, Tensor], Tensor], **config: Any) -> list[float]:
    engine = engine_of(Own(way), **config)
    found = train(engine, batch)
    engine.destroy()
    return found


def outputs(engine: Any, x: Tensor) -> Tensor:
    out: Tensor = engine(x).detach()
    return out


# -- what it depends on ----------------------------------------------------------------------------


def test_step_call_module_and_seed_change_it() -> None:
    x = torch.ones(MICRO, 50, 5, dtype=torch.float64)
    still = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    found = []
    for seed in (1, 2):
        engine = engine_of(Own(Own.module), reproducibility={"seed": seed}, **still)
        for _ in range(2):
            # Two forwards of a micro-batch, and of the next step.
            out = engine(x)
            found += [out.detach(), outputs(engine, x)]
            engine.backward(out.mean())
            engine.step()
        engine.destroy()
    for i, one in enumerate(found):
        for other in found[:i]:
            assert difference(one, other) > 0.01
    # The same coordinates: the same bits, whatever torch's generator is.
    torch.manual_seed(77)
    engine = engine_of(Own(Own.module), reproducibility={"seed": 1}, **still)
    assert torch.equal(outputs(engine, x), found[0])


def test_modules_draw_different_masks() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Dropout(0.5)
            self.b = nn.Dropout(0.5)
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.a(x), self.a(x), self.b(x)]) * self.weight

    engine = engine_of(Two())
    masks = engine(torch.ones(MICRO, 4000, dtype=torch.float64)).detach().reshape(3, -1)
    assert torch.corrcoef(masks).fill_diagonal_(0).abs().max() < 0.06
    assert (masks.mean(1) - 1).abs().max() < 0.06
    assert set(masks.unique().tolist()) == {0.0, 2.0}


def test_micro_batches_of_other_sizes_and_an_order() -> None:
    def one(size: int, samples: str) -> Tensor:
        """What the samples of a step become, in their order in the step."""
        engine = engine_of(
            Own(Own.module), micro=size, gas=4 // size, reproducibility={"samples": samples}
        )
        parts = []
        for micro in range(4 // size):
            out = engine(torch.ones(size, 50, 5, dtype=torch.float64) + micro * 0)
            parts.append(out.detach())
            engine.backward(out.mean())
            engine.step()
        engine.destroy()
        return torch.cat(parts)

    wanted = one(4, "blocks")
    assert difference(wanted[0], wanted[1]) > 0.01
    for samples in ("blocks", "interleaved"):
        for size in (1, 2):
            assert torch.equal(one(size, samples), wanted)


def test_the_generator_goes_on_as_it_was_and_evaluation_draws_nothing() -> None:
    engine = engine_of(Net())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    engine(batch(0, 0)).mean().backward()
    assert torch.equal(torch.get_rng_state(), before)
    engine.eval()
    assert torch.equal(outputs(engine, batch(0, 0)), outputs(engine, batch(0, 0)))


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    def part(begin: int, end: int, load: bool) -> Any:
        engine = engine_of(Net(), gas=2)
        if load:
            # What was drawn before is not what counts.
            train(engine, batch, 1)
            engine.load_checkpoint(str(tmp_path))
        losses = train(engine, batch, range(begin, end))
        if not load and end == 2:
            engine.save_checkpoint(str(tmp_path))
        found = whole_weights(engine)
        engine.destroy()
        return losses, found

    whole = part(0, 4, load=False)
    half = part(0, 2, load=False)
    rest = part(2, 4, load=True)
    assert half[0] + rest[0] == whole[0]
    same(rest[1], whole[1])


def test_destroy_gives_the_model_back() -> None:
    model = Net().double()
    engine = engine_of(model)
    copied = copy.deepcopy(engine.module)
    engine(batch(0, 0))
    engine.destroy()
    for one in (model, copied):
        assert not any("forward" in vars(module) for module in model.modules())
        fresh = Net().double()
        fresh.load_state_dict(one.state_dict())
        torch.manual_seed(5)
        wanted = fresh(batch(0, 0))
        torch.manual_seed(5)
        assert torch.equal(one(batch(0, 0)), wanted)


# -- functions -------------------------------------------------------------------------------------


def test_attention_is_torchs_without_dropout_and_drops_its_weights() -> None:
    from ds_reproducibility.counter import Grid, Key
    from ds_reproducibility.functions import attention

    class Fixed:
        def draw(self, shape: Any, device: Any, target: Any = None) -> Any:
            return Key.of(0), Grid([torch.arange(size) for size in shape])

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.randn(5, 5, dtype=torch.float64)
    ways: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": mask},
        {"attn_mask": mask > 0},
    ]
    for options in ways:
        found = attention(Fixed(), q, k, v, dropout_p=1e-12, enable_gqa=True, **options)
        wanted = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)
    # The values are rows of the identity, so the output is the weights themselves.
    eye = torch.eye(5, dtype=torch.float64).expand(2, 4, 5, 5)
    weights = attention(Fixed(), q, q, eye, dropout_p=0.4)
    kept = weights != 0
    whole = functional.scaled_dot_product_attention(q, q, eye)
    torch.testing.assert_close(weights, torch.where(kept, whole / 0.6, 0.0))
    assert 0.45 < kept.double().mean() < 0.75


DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, x: functional.dropout(x, 0.3, m.training),
    "in place": lambda m, x: functional.dropout(x * 1, 0.3, m.training, True),
    "everything": lambda m, x: functional.dropout(x, 1.0, m.training),
    "channels": lambda m, x: functional.dropout1d(x, 0.3, m.training),
    "rand": lambda m, x: x * torch.rand(len(x), 1, 1, dtype=x.dtype),
    "rand of a size": lambda m, x: x * torch.rand(x.shape, dtype=x.dtype),
    "randn_like": lambda m, x: x + torch.randn_like(x),
    "bernoulli": lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "stochastic depth": lambda m, x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.7),
    "bernoulli of tensors": lambda m, x: (
        x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5))
    ),
    "gumbel": lambda m, x: functional.gumbel_softmax(x, hard=True),
    "uniform": lambda m, x: x * torch.empty_like(x).uniform_(0.5, 1.5),
    "layer drop": lambda m, x: x * (torch.rand([]) < 0.9).to(x.dtype),
}


@pytest.mark.parametrize("name", DRAWS)
def test_functions_draw_by_sample(name: str) -> None:
    # Accumulation of 2 micro-batches of 1 is one of 2, unless a micro-batch draws one number.
    size = MICRO if name == "layer drop" else 1

    def way(module: Any, x: Tensor) -> Tensor:
        return DRAWS[name](module, module.linear(x))

    def out(size: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        engine = engine_of(Own(way), micro=size, gas=MICRO // size)
        parts = []
        for x in batch(0, 0).split(size):
            parts.append(engine(x))
            engine.backward(parts[-1].mean())
            engine.step()
        engine.destroy()
        return torch.cat(parts).detach()

    found = out(size, 1)
    assert torch.equal(found, out(MICRO, 2))


# -- drawn again in backward -----------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_a_model_of_its_own(reentrant: bool) -> None:
    found = []
    for again in (False, True):
        model: Any = gpt2()
        if again:
            switch_on = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            switch_on({"use_reentrant": reentrant})
        found.append(trained(model, ids, gas=2))
    same(found[1], found[0])


def test_a_checkpoint_of_a_method_that_calls_modules() -> None:
    def way(module: Any, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(module.module, x, use_reentrant=False)
        return out

    assert losses_of(way) == losses_of(Own.module)


LOST: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a function in a checkpoint": (
        lambda m, x: checkpoint(m.function, x, use_reentrant=False),  # type: ignore[no-any-return]
        "the model's own Own draws random numbers in a function that it gives to a checkpoint",
    ),
    "a re-entrant one": (
        lambda m, x: checkpoint(m.function, x.requires_grad_(), use_reentrant=True),  # type: ignore[no-any-return]
        "in a function that it gives to a checkpoint",
    ),
    "without the state": (
        lambda m, x: checkpoint(m.module, x, use_reentrant=False, preserve_rng_state=False),  # type: ignore[no-any-return]
        "leave preserve_rng_state of torch.utils.checkpoint on",
    ),
    "alpha dropout": (
        lambda m, x: functional.alpha_dropout(m.linear(x), 0.1, m.training),
        "alpha dropout is not offered",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_drawn_again_is_refused(name: str) -> None:
    way, why = LOST[name]
    with pytest.raises(UsageError, match=why):
        losses_of(way)


def test_a_seed_in_the_forward_of_a_checkpoint_is_refused() -> None:
    def way(module: Any, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        out: Tensor = checkpoint(module.module, x, use_reentrant=False)
        return out

    with pytest.raises(UsageError, match="seed no generator in the model's forward"):
        losses_of(way)


def test_saved_tensors_on_the_host_are_no_checkpoint() -> None:
    def way(module: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = module.function(x)
        return out

    assert losses_of(way) == losses_of(Own.function)


# -- what is refused or told -----------------------------------------------------------------------


def test_random_functions_that_are_left_to_torch_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def way(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module.linear(x) * torch.randint(1, 3, (1,))
        return out

    with caplog.at_level(logging.WARNING, "ds_reproducibility"):
        assert losses_of(way) == losses_of(way)
    assert caplog.text.count("randint in the model's own Own is not offered") == 1
    engine = engine_of(Net())
    with caplog.at_level(logging.WARNING, "ds_reproducibility"):
        engine.module.blocks[1](torch.ones(1, 6, dtype=torch.float64))
    assert "'blocks.1' is not drawn by reproducibility" in caplog.text


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"reproducibility": {"seed": -1}}, "seed"),
        ({"reproducibility": {"seed": 2**63}}, "seed"),
        ({"reproducibility": {"seed": True}}, "seed"),
        ({"reproducibility": {"samples": "any"}}, "samples"),
        ({"reproducibility": {"batch_dim": 2}}, "batch_dim"),
        ({"reproducibility": {}, "compile": {"at_start": True}}, "compile.at_start"),
    ],
)
def test_bad_keys(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        start(Net(), **section)


def layers(*specs: Any, **options: Any) -> nn.Module:
    return PipelineModule(list(specs), num_stages=1, loss_fn=functional.mse_loss, **options)


class Tied(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(super().forward(input), 0.3, self.training)


SHARED = nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: layers(LayerSpec(Layer, 0), seed_layers=True), "leave seed_layers out"),
        (lambda: layers(LayerSpec(Layer, 0), SHARED, LayerSpec(Layer, 1), SHARED), "one module"),
        (lambda: nn.LSTM(5, 5, 2, dropout=0.1), "put nn.Dropout between layers"),
    ],
    ids=["seed_layers", "a module twice", "lstm"],
)
def test_models_that_are_refused(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        engine_of(make())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: layers(LayerSpec(Layer, 0), lambda x: functional.dropout(x, 0.1)),
            "make it a module",
        ),
        (
            lambda: layers(TiedLayerSpec("t", Tied, 6, 6), TiedLayerSpec("t", Tied, 6, 6)),
            "draws random numbers where it is used again",
        ),
    ],
    ids=["a function", "a tied layer twice"],
)
def test_layers_of_a_pipeline_that_are_refused(model: Any, why: str) -> None:
    engine = engine_of(model())
    x = torch.zeros(MICRO, 3, 6, dtype=torch.float64)
    with pytest.raises(UsageError, match=why):
        engine.train_batch(iter([(x, x)]))
