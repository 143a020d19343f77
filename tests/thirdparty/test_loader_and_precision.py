"""A token-budget loader and a float8 mode, each at most 70 lines, through the public contract
alone.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import LoaderConformance, PluginConformance, PrecisionConformance
from ds_testing.pytest_plugin import Ranks
from ds_testing.truth import start
from torch import Tensor, nn
from torch.nn import functional as F

import ds_core
from ds_core.errors import CheckpointError, ConfigError, PluginError, RankMismatchError, UsageError

HERE = Path(__file__).parent
PUBLIC = {"ds_core.config", "ds_core.engine", "ds_core.precision"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize("package", ["token_budget", "float8"])
def test_it_is_small_and_uses_the_public_contract_alone(package: str) -> None:
    files = sorted((HERE / package).glob("*.py"))
    assert sum(len(f.read_text().splitlines()) for f in files) <= 70
    nodes = [node for f in files for node in ast.walk(ast.parse(f.read_text()))]
    imported = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    assert {m for m in imported if m.partition(".")[0].startswith("ds_")} <= PUBLIC
    assert not [
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and n.attr.startswith("_") and n.attr[1] != "_"
    ]


# -- the loader ------------------------------------------------------------------------------------

WORDS = 11
LENGTHS = [
    3,
    9,
    5,
    2,
    7,
    12,
    4,
    6,
    8,
    1,
    10,
    3,
    5,
    11,
    2,
    6,
    7,
    4,
    9,
    3,
    5,
    8,
    2,
    6,
    10,
    4,
    3,
    7,
    5,
    12,
]
BUDGET = {"token_budget": {"tokens": 24}}
LOAD = ("token_budget=token_budget.plugin",)


def texts() -> list[Tensor]:
    """Texts of unequal lengths; the first word is the text's own, none is 0, which pads."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(1, WORDS, (n,), generator=generator) for n in LENGTHS]
    return [torch.cat([torch.tensor([WORDS + i]), t[1:]]) for i, t in enumerate(made)]


class Words(nn.Module):
    """Predicts each word from itself: the mean over its words, times the weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS + len(LENGTHS), 4, dtype=torch.float64)
        self.head = nn.Linear(4, WORDS + len(LENGTHS), dtype=torch.float64)

    def forward(self, words: Tensor, weight: float = 1.0) -> Tensor:
        return (
            F.cross_entropy(
                self.head(self.table(words)).flatten(0, 1), words.flatten(), ignore_index=0
            )
            * weight
        )


class TestBudget(PluginConformance):
    entry_point, section, good_config, bad_configs = (
        "token_budget.plugin",
        *(["token_budget", {"tokens": 8}, [{}, {"tokens": 0}]]),
    )


class TestTokenBudget(LoaderConformance):
    config = BUDGET
    load = LOAD
    drops = True

    def make_dataset(self) -> list[Tensor]:
        return texts()

    def all_samples(self) -> list[int]:
        return [WORDS + i for i in range(len(LENGTHS))]

    def samples_of(self, batch: tuple[Tensor, float]) -> list[int]:
        assert batch[0].numel() <= BUDGET["token_budget"]["tokens"]
        return batch[0][:, 0].tolist()


def engine_of(zero: dict[str, Any], gas: int) -> ds_core.Engine:
    sgd = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
    sections = {"plugins": {"load": list(LOAD)}, **BUDGET, **zero}
    data = texts()
    return start(Words(), micro=1, gas=gas, clip=0.5, optimizer=sgd, training_data=data, **sections)


def trained(zero: dict[str, Any], folder: str) -> dict[str, Any]:
    """On a rank: the words of each micro-batch and the loss of each step, without and with a
    checkpoint in between.
    """
    engine = engine_of(zero, gas=2)
    seen: list[list[int]] = []
    engine.module.register_forward_pre_hook(
        lambda module, given: seen.append(given[0][given[0] > 0].tolist())
    )
    losses = []
    samples = []
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(folder)
        losses.append(engine.train_batch().item())
        samples.append(engine.global_samples)
    resumed = engine_of(zero, gas=2)
    resumed.load_checkpoint(folder)
    again = [resumed.train_batch().item() for _ in range(2)]
    result = {
        "words": seen,
        "losses": losses,
        "again": again,
        "samples": samples,
        "resumed": resumed.global_samples,
    }
    with pytest.raises(
        UsageError, match="TokenBudgetLoader, which a plugin made, has no set_batch_size"
    ):
        engine.set_train_micro_batch_size(3)
    engine.destroy()
    resumed.destroy()
    return result


@pytest.mark.parametrize(
    "zero", [{}, {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}]
)
@pytest.mark.parametrize("world", [1, 2])
def test_each_token_counts_the_same(
    world: int, zero: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Losses are those of plain torch that takes the mean over all words of a step; resuming is
    bit-identical.
    """
    found = ranks(world, trained, zero, str(tmp_path))
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        words = [
            w for rank in found for batch in rank["words"][2 * step : 2 * step + 2] for w in batch
        ]
        loss = model(torch.tensor([words]))
        assert all(abs(rank["losses"][step] - loss.item()) < 1e-12 for rank in found)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for rank in found:
        assert rank["again"] == rank["losses"][2:]
        count = [sum(w >= WORDS for b in r["words"][: 2 * 4] for w in b) for r in found]
        assert rank["samples"][-1] == rank["resumed"] == sum(count)


def staged(folder: str) -> dict[str, Any]:
    """On a stage of three: losses without and with a checkpoint in between, and what the loader has
    given here.
    """
    from ds_pipeline import PipelineModule

    def begin() -> ds_core.Engine:
        torch.manual_seed(0)
        layers = [nn.Embedding(WORDS + len(LENGTHS), 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "plugins": {"load": list(LOAD)},
            "pipeline": {},
        }
        model = PipelineModule(layers, num_stages=3, loss_fn=weighted, partition_method="uniform")
        return ds_core.initialize(model=model, config={**config, **BUDGET}, training_data=texts())[
            0
        ]

    engine = begin()
    losses = [engine.train_batch().item()]
    engine.save_checkpoint(folder)
    losses.append(engine.train_batch().item())
    resumed = begin()
    resumed.load_checkpoint(folder)
    again = resumed.train_batch().item()
    loader: Any = engine.training_dataloader
    result = {
        "losses": losses,
        "again": again,
        "given": loader.samples_seen,
        "samples": engine.global_samples,
    }
    engine.destroy()
    resumed.destroy()
    return result


def weighted(out: Tensor, weight: float) -> Tensor:
    return out.square().mean() * weight


def test_only_stages_that_need_data_read_it(ranks: Ranks, tmp_path: Path) -> None:
    first, middle, last = ranks(3, staged, str(tmp_path))
    assert first["losses"] == middle["losses"] == last["losses"]
    assert first["again"] == first["losses"][1]
    assert first["given"] == last["given"] == first["samples"] > 0 == middle["given"]


@pytest.mark.usefixtures("clean_ds")
def test_the_position_of_another_loader_is_refused(tmp_path: Path) -> None:
    engine = engine_of({}, gas=1)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    plain, *_ = ds_core.initialize(model=Words(), config=config, training_data=texts())
    plain.save_checkpoint(str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"'batches': 0.* does not fit TokenBudgetLoader.*KeyError: 'done'"
    ):
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)


# -- the precision mode ----------------------------------------------------------------------------


class TestFloat8(PluginConformance):
    entry_point, section, good_config, bad_configs = (
        "float8.plugin",
        *(["float8", {"skip": ["head"]}, [{"skip": 1}, {"kip": []}]]),
    )


class TestFloat8Mode(PrecisionConformance):
    config = {"float8": {"skip": ["5"]}}
    load = ("float8=float8.plugin",)
    tolerance = 0.02
    variants = {
        "": {},
        "stage 2": {"zero_optimization": {"stage": 2}},
        "stage 3": {"zero_optimization": {"stage": 3}},
    }


class TestFloat8OnFp16(PrecisionConformance):
    """On a mode of the core's that scales losses."""

    config = {"float8": {}, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    load = ("float8=float8.plugin",)
    tolerance = 0.03
    gas = (2,)
    variants = {"stage 2": {"zero_optimization": {"stage": 2}}}


def test_layers_are_replaced_and_compute_in_e4m3() -> None:
    from float8.linear import Float8Linear

    config = {
        "train_batch_size": 1,
        "plugins": {"load": ["float8=float8.plugin"]},
        "float8": {"skip": ["1"]},
    }
    engine, *_ = ds_core.initialize(
        model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), config=config
    )
    assert [type(m) for m in engine.module] == [Float8Linear, nn.Linear]
    with torch.no_grad():
        engine.module[0].weight.copy_(torch.eye(4)[0].expand(4, 4))
        engine.module[0].bias.zero_()
    x = torch.tensor([[448.0, 0.0, 0.0, 0.0], [250.0, 448.0, 0.0, 0.0]])
    assert engine.module[0](x)[:, 0].tolist() == [448.0, 256.0]  # e4m3 has 240 and 256
    assert "float8 e4m3 but for ['1']" in str(engine.ctx.precision)
    engine.destroy()


WRONG = {
    "a dtype": ("return 'bf16'", "must return a Precision or None, not a str"),
    "no model": (
        "import dataclasses\n    return dataclasses.replace(base, convert=lambda model: None)",
        "must return the model",
    ),
    "fails": (
        "raise ValueError('no such format')",
        "failed in ds_precision: ValueError: no such format",
    ),
}


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("case", WRONG)
def test_what_a_mode_does_wrong_is_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, message = WRONG[case]
    (tmp_path / "odd_mode.py").write_text(f"def ds_precision(config, base):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("odd_mode", None)
    with pytest.raises(PluginError, match=f"odd_mode.*{message}"):
        ds_core.initialize(
            model=nn.Linear(2, 2), config={"train_batch_size": 1, "plugins": {"load": ["odd_mode"]}}
        )


@pytest.mark.usefixtures("clean_ds")
def test_what_is_no_loader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_loader.py").write_text("def ds_loader(ctx, request):\n    return [1]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"train_batch_size": 1, "plugins": {"load": ["odd_loader"]}}
    with pytest.raises(
        PluginError,
        match=r"odd_loader.* with __iter__, state_dict, load_state_dict or None, not a list",
    ):
        ds_core.initialize(model=nn.Linear(2, 2), config=config, training_data=[1])


def unequal(folder: str) -> str:
    """On a rank: a mode that depends on the rank, under one config."""
    import os

    body = "import dataclasses, os\n\ndef ds_precision(config, base):\n"
    body += "    return dataclasses.replace(base, name='mode ' + os.environ['RANK'])\n"
    own = Path(folder) / str(os.getpid())
    own.mkdir()
    (own / "unequal_mode.py").write_text(body)
    sys.path.insert(0, str(own))
    try:
        ds_core.initialize(
            model=nn.Linear(2, 2),
            config={"train_batch_size": 2, "plugins": {"load": ["unequal_mode"]}},
        )
    except RankMismatchError as error:
        return str(error)
    finally:
        sys.path.remove(str(own))
    return ""


def test_ranks_must_have_one_mode(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, unequal, str(tmp_path)):
        assert "precision" in text and "mode 0" in text and "mode 1" in text


def test_float8_alone_names_its_package() -> None:
    with pytest.raises(ConfigError, match="float8"):
        ds_core.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "float8": {}})
