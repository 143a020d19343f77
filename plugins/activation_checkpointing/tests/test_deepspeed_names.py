"""Names of `deepspeed.checkpointing` that Megatron-DeepSpeed and others take beside
`checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from ds_activation_checkpointing.deepspeed import checkpointing, random_tracker
from ds_activation_checkpointing.deepspeed import names as deepspeed_names
from ds_run_state.random_streams import STREAMS

from ds_core.errors import UsageError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    kept = {
        name: getattr(checkpointing._Present, name) for name in ("settings", "by", "mpu", "values")
    }
    yield
    for name, value in kept.items():
        setattr(checkpointing._Present, name, value)
    STREAMS.reset()


def test_tensors_are_taken_out_and_put_back() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    given = (x, None, 3, torch.zeros(1))
    tensors, others, flags = deepspeed_names.extract_tensors(given)
    assert (others, flags) == ((None, 3), (True, False, False, True))
    assert all(
        a is b
        for a, b in zip(deepspeed_names.merge_tensors(tensors, others, flags), given, strict=True)
    )
    assert deepspeed_names.extract_tensors([1, x])[2] == [False, True]
    leaf, none, _, plain = deepspeed_names.detach_variable(given)
    assert leaf.is_leaf and leaf.requires_grad and not plain.requires_grad and none is None
    with pytest.raises(UsageError, match="takes a tuple, not a list"):
        deepspeed_names.detach_variable([x])  # type: ignore[arg-type]


def test_the_model_parallel_seed_begins_anew_alone() -> None:
    """As Megatron-DeepSpeed does after a universal checkpoint was loaded at other degrees."""
    mpu = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1)
    checkpointing.configure(mpu)
    tracker = random_tracker.get_cuda_rng_tracker()
    random_tracker.model_parallel_cuda_manual_seed(7)
    with tracker.fork():
        first = torch.rand(3)
    outside = torch.rand(3)
    random_tracker.model_parallel_cuda_manual_seed(7)
    with tracker.fork():
        torch.rand(5)
    random_tracker.model_parallel_reconfigure_tp_seed(7)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)
        with pytest.raises(UsageError, match="is in use"):
            random_tracker.model_parallel_reconfigure_tp_seed(8)
    assert torch.equal(torch.rand(3), outside)


def test_settings_change_after_configure() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=False, num_checkpoints=2)
    checkpointing.set_num_layers(5)
    checkpointing.partition_activations_in_checkpoint(True)
    values = checkpointing._Present.values
    assert (values["number_checkpoints"], values["partition_activations"]) == (5, True)
    checkpointing._Present.by = checkpointing._By.RUN
    with pytest.raises(UsageError, match="the section activation_checkpointing"):
        checkpointing.set_num_layers(3)
