"""The tables that the documents print, whole and to the digit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_zero.planning import estimators
from torch import nn

HEAD = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
"""

ZERO2 = """\
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  {0}GB |   5.31GB | offload_optimizer=cpu
  {0}GB |  15.93GB | offload_optimizer=None
"""

ZERO3_LIVE = """\
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.71GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.48GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.74GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.48GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.47GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.48GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=0
"""

ZERO3_COLD = """\
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""

# t5-3b: its embedding is the largest layer
LARGEST = 32128 * 1024
TOTAL = 2_851_598_336


def t5_3b() -> nn.Module:
    """A model without memory that has t5-3b's counts, with an embedding that three modules share,
    as there.
    """
    model = nn.Module()
    model.shared = nn.Embedding(32128, 1024, device="meta")
    model.encoder = nn.Embedding(32128, 1024, device="meta")
    model.head = nn.Module()
    model.encoder.weight = model.shared.weight  # the same parameter
    model.head.weight = nn.Parameter(model.shared.weight.detach())  # another one of the same memory
    rest = TOTAL - LARGEST
    layers = []
    while rest:
        layers.append(nn.Module())
        layers[-1].weight = nn.Parameter(torch.empty(min(rest, LARGEST - 1), device="meta"))
        rest -= layers[-1].weight.numel()
    model.blocks = nn.ModuleList(layers)
    return model


def test_the_live_model_is_counted_once_per_storage() -> None:
    assert estimators.count_params(t5_3b()) == (TOTAL, LARGEST)


def test_shared_and_neighbouring_memory_on_a_real_device() -> None:
    model = nn.Module()
    flat = torch.zeros(10)
    # two parts of one storage
    model.first = nn.Parameter(flat[:6])
    model.second = nn.Parameter(flat[6:])
    model.part = nn.Parameter(flat[:2])  # lies in the first
    model.child = nn.Linear(4, 2)
    # the largest layer is the model: 6 + 4 + 2 of its own
    assert estimators.count_params(model) == (10 + 10, 12)
    assert estimators.count_params(nn.Identity()) == (0, 0)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: estimators.estimate_zero2_model_states_mem_needs_all_live(t5_3b(), 8, 1),
            ZERO2.format("127.48"),
        ),
        (
            lambda: estimators.estimate_zero2_model_states_mem_needs_all_cold(2851e6, 8, 1),
            ZERO2.format("127.45"),
        ),
        (
            lambda: estimators.estimate_zero3_model_states_mem_needs_all_live(t5_3b(), 8, 1),
            ZERO3_LIVE,
        ),
        (
            lambda: estimators.estimate_zero3_model_states_mem_needs_all_cold(2851e6, 32e6, 8, 1),
            ZERO3_COLD,
        ),
    ],
    ids=["zero2 live", "zero2 cold", "zero3 live", "zero3 cold"],
)
def test_the_documented_tables(
    call: Callable[[], None], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call()
    assert capsys.readouterr().out == HEAD + expected


def test_figures_of_four_digits_keep_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """70 B parameters on 4 machines, with the plural and the singular in the heading."""
    estimators.estimate_zero3_model_states_mem_needs_all_cold(69503e6, 1050e6, num_nodes=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "HW: Setup with 4 nodes, 1 GPU per node.",
        "SW: Model with 69503M total params, 1050M largest layer params.",
    ]
    assert (
        lines[4]
        == "  436.93GB |   3.91GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1"
    )
    assert (
        lines[8]
        == "    5.87GB | 295.20GB | offload_param=none, offload_optimizer=none, zero_init=1"
    )
    estimators.estimate_zero2_model_states_mem_needs_all_cold(
        69503e6, num_gpus_per_node=12, num_nodes=4
    )
    assert (
        capsys.readouterr().out.splitlines()[4] == " 4660.54GB | 129.46GB | offload_optimizer=cpu"
    )


@pytest.mark.parametrize(
    ("optimizer", "params", "megabytes"),
    [(False, False, 3291), (True, True, 125), (True, False, 477)],
)
def test_the_documented_example_of_t5_large(optimizer: bool, params: bool, megabytes: int) -> None:
    host, device, layer = estimators.estimate_zero3_model_states_mem_needs(
        737_668_096, LARGEST, num_gpus_per_node=4, cpu_offload=optimizer, cpu_offload_params=params
    )
    assert (device >> 20, layer >> 20) == (megabytes, 125)
    assert all(type(x) is int for x in (host, device, layer))


# small enough for exact arithmetic by hand
P = 1_000_000
LAYER = 10_000


@pytest.mark.parametrize(
    ("devices", "nodes", "offload", "expected"),
    [
        # 4 bytes for one process are less than the optimizer's 16
        (1, 1, True, (16 * P * 2, 2 * P)),
        (8, 1, True, (32 * P * 2, 2 * P)),
        (8, 2, True, (32 * P * 2, 2 * P)),
        (1, 1, False, (4 * P * 2, 20 * P)),
        (2, 4, False, (8 * P * 2, 6 * P)),
    ],
)
def test_rows_of_stage_2(
    devices: int, nodes: int, offload: bool, expected: tuple[int, int]
) -> None:
    row = estimators.estimate_zero2_model_states_mem_needs(
        P, devices, nodes, offload, additional_buffer_factor=2
    )
    assert row == expected


@pytest.mark.parametrize(
    ("devices", "nodes", "options", "host", "device"),
    [
        # each machine keeps half of the 18, and two whole models of 4 are less
        (2, 2, {}, 9 * P * 2, 0),
        (2, 2, {"zero_init": False}, 9 * P * 2, 0),
        # a machine's 18 / 4 are less than two whole models of 4
        (2, 4, {"zero_init": False}, 8 * P * 2, 0),
        (2, 4, {"cpu_offload_params": False}, 4 * P * 2, P // 4),
        (2, 4, {"cpu_offload_params": False, "zero_init": False}, 8 * P * 2, P // 4),
        (2, 4, {"cpu_offload": False}, 8 * LAYER * 2, 18 * P // 8),
        (2, 4, {"cpu_offload": False, "zero_init": False}, 8 * P * 2, 18 * P // 8),
    ],
)
def test_rows_of_stage_3(
    devices: int, nodes: int, options: dict[str, Any], host: int, device: int
) -> None:
    row = estimators.estimate_zero3_model_states_mem_needs(
        P, LAYER, devices, nodes, additional_buffer_factor=2, **options
    )
    assert row == (host, 4 * LAYER + device, 4 * LAYER)


@pytest.mark.parametrize(
    ("machines", "name"), [((0, 1), "num_gpus_per_node is 0"), ((1, -1), "num_nodes is -1")]
)
def test_no_devices_is_an_error_and_prints_nothing(
    machines: tuple[int, int], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=f"{name}; it must be at least 1"):
        estimators.estimate_zero2_model_states_mem_needs_all_cold(P, *machines)
    with pytest.raises(ValueError, match=name):
        estimators.estimate_zero3_model_states_mem_needs_all_cold(P, LAYER, *machines)
    assert capsys.readouterr().out == ""


def test_no_torch_is_needed_for_the_cold_ones() -> None:
    code = (
        "import sys, ds_zero.planning.estimators as e; "
        "e.estimate_zero2_model_states_mem_needs_all_cold(1e9); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=None).returncode == 0
