"""``dscore config check`` names what is wrong in every stage of the check, each problem once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import dscore
from ds_cli.config.problems import with_every_problem

from ds_core.config.source import ConfigSource, read_config
from ds_core.errors import ConfigError, KernelError, Problem


def paths(tmp_path: Path, config: dict[str, Any] | str, *words: str) -> list[str]:
    """The keys that ``config check`` names, in its order."""
    file = tmp_path / "c.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    done = dscore("config", "check", str(file), *words)
    assert done.exit_code == 1, done.output
    head = f"{file}: "
    assert all(line.startswith(head) for line in done.output.splitlines()), done.output
    return [line.removeprefix(head).partition(": ")[0] for line in done.output.splitlines()]


def test_all_stages_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    config = """{
        "fp17": 1,
        "gradient_clipping": NaN,
        "optimizer": {"type": "AdamW", "params": {"lr": -1, "eps": NaN}},
        "scheduler": {"type": "WarmpLR"},
        "kernels": {"adan": "x", "adam": "nobody"},
        "plugins": {"require": ["dscore-zero>=99", "no-such-package"], "load": ["no.such", "s=no.x"]},
        "zero_optimization": {"stage": "3", "reduce_bucket_size": -1},
        "train_batch_size": 8
    }"""
    assert paths(tmp_path, config, "--import") == [
        "fp17",
        "gradient_clipping",
        "optimizer.params.lr",
        "optimizer.params.eps",
        "scheduler.type",
        "kernels.adan",
        "kernels.adam",
        "plugins.require[0]",
        "plugins.require[1]",
        "plugins.load[0]",
        "plugins.load[1]",
        "zero_optimization.stage",
        "zero_optimization.reduce_bucket_size",
    ]


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        # an unknown key hides neither the optimizer's name nor the schedule's
        (
            {"x": 1, "optimizer": {"type": "AdmW"}, "scheduler": {"type": "WarmpLR"}},
            (),
            ["x", "optimizer.type", "scheduler.type"],
        ),
        # what is without a value now is no problem of its own
        (
            {"optimizer": {"type": 3}, "scheduler": {"type": "Warmp"}},
            (),
            ["optimizer.type", "scheduler.type"],
        ),
        ({"train_batch_size": "8"}, ("--world", "2"), ["train_batch_size"]),
        ({"zero_optimisation": {"stage": 3}, "train_batch_size": 1}, (), ["zero_optimisation"]),
        # rules and numbers of processes come last, and are told too
        (
            {"x": 1, "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            ("--world", "2"),
            ["x", "train_batch_size"],
        ),
        (
            {"fp16": {"enabled": True, "loss_scal": 1}, "bf16": {"enabled": True}},
            (),
            ["fp16.loss_scal", "bf16.enabled"],
        ),
        # no number of processes would do
        (
            {
                "train_batch_size": 63,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            (),
            ["train_batch_size"],
        ),
    ],
)
def test_nothing_hides_anything(
    tmp_path: Path, config: dict[str, Any], words: tuple[str, ...], expected: list[str]
) -> None:
    assert paths(tmp_path, config, *words) == expected


def test_names_that_a_broken_module_may_offer_are_not_called_wrong(tmp_path: Path) -> None:
    config = {"plugins": ["no.such"], "optimizer": {"type": "Mine"}, "mine": {}, "fp17": {}}
    assert paths(tmp_path, config, "--import") == ["plugins.load[0]", "fp17"]


def test_overrides_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = tmp_path / "more.json"
    more.write_text('{"zero_optimization.stage": 5, "fp16": {"enabled": 1}}')
    monkeypatch.setenv("DS_CONFIG_OVERRIDES", str(more))
    file = tmp_path / "c.json"
    file.write_text('{"zero_optimization": {"stage": 1, "x": 2}}')
    done = dscore("config", "check", str(file))
    assert [line.split(": ")[1] for line in done.output.splitlines()] == [
        "zero_optimization.stage",
        "zero_optimization.x",
        "fp16.enabled",
    ]


def test_a_check_that_ends_at_the_first_problem_is_repeated_until_enough() -> None:
    def one_at_a_time(source: ConfigSource) -> None:
        for key in source.raw:
            raise ConfigError([Problem(key, "wrong")])

    source = read_config({f"k{i}": i for i in range(1000)}, in_part=True)
    with pytest.raises(ConfigError) as caught:
        with_every_problem(one_at_a_time, source)
    assert len(caught.value.problems) == 100


def test_an_error_without_a_key_is_raised_as_it_is() -> None:
    error = KernelError("the compiler is broken")

    def fails(source: ConfigSource) -> None:
        raise error

    with pytest.raises(KernelError, match="the compiler is broken"):
        with_every_problem(fails, read_config({"a": 1}, in_part=True))
