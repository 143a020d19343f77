"""Small functions and classes of DeepSpeed's that public programs import: what they answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_comms_logger import comms_text
from ds_deepspeed_compat import io_command, launcher
from ds_deepspeed_compat.configs import config_readers
from ds_deepspeed_compat.configs.ragged_config import RaggedInferenceEngineConfig
from ds_deepspeed_compat.services.checkpoint_engines import (
    CheckpointCommitInfo,
    CheckpointEngine,
    TorchCheckpointEngine,
)
from ds_deepspeed_compat.services.file_writers import (
    FastFileWriter,
    FastFileWriterConfig,
    MockFileWriter,
    PyFileWriter,
)
from ds_deepspeed_compat.utils import bwc, debug_names
from ds_deepspeed_compat.utils.module_paths import (
    convert_conv1d_to_linear,
    recursive_getattr,
    recursive_setattr,
)
from ds_deepspeed_compat.utils.timers import ThroughputTimer
from ds_testing import run_ranks
from torch import Tensor, nn


class Conv1D(nn.Module):
    """As transformers has it: weight (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_modules_by_their_dotted_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Conv1D()))
    assert recursive_getattr(model, "1.0.weight") is model[1][0].weight
    x = torch.randn(4, 3)
    before = model[1](x)
    assert convert_conv1d_to_linear(model, Conv1D) is model
    assert type(model[1][0]) is nn.Linear
    assert torch.allclose(model[1](x), before)
    recursive_setattr(model, "1.0", nn.Identity())
    assert isinstance(model[1][0], nn.Identity)
    recursive_setattr(model, "extra", 3)
    assert model.extra == 3


def test_files_of_torch_save(tmp_path: Path) -> None:
    engine = TorchCheckpointEngine()
    path = str(tmp_path / "states.pt")
    engine.save({"step": 1, "w": torch.ones(3)}, path)
    found = engine.load(path, map_location=lambda storage, _: storage)
    engine.save({"step": 2, "w": torch.zeros(3)}, path)  # what was read does not hang on the file
    assert (found["step"], found["w"].tolist()) == (1, [1, 1, 1])
    assert engine.load(path, map_location="cpu")["step"] == 2
    assert engine.commit(CheckpointCommitInfo("a", str(tmp_path), True))


@pytest.mark.parametrize("size", [16, 1 << 16])
def test_writers_of_files(tmp_path: Path, size: int) -> None:
    values = {"a": torch.arange(1000), "b": torch.randn(7)}
    fast = FastFileWriter(
        tmp_path / "fast.pt", FastFileWriterConfig(None, torch.empty(size, dtype=torch.uint8))
    )
    plain = PyFileWriter(tmp_path / "plain.pt")
    for writer in (fast, plain):
        torch.save(values, writer)
        writer.close()
    assert (tmp_path / "fast.pt").read_bytes() == (tmp_path / "plain.pt").read_bytes()
    assert torch.equal(torch.load(tmp_path / "fast.pt")["b"], values["b"])
    assert fast._stats["bytes"] == (tmp_path / "fast.pt").stat().st_size
    mock = MockFileWriter(tmp_path / "mock.pt")
    torch.save(values, mock)
    assert mock._stats["bytes"] == fast._stats["bytes"]
    assert (tmp_path / "mock.pt").stat().st_size == 0


def test_parallel_writers_share_the_bytes(tmp_path: Path) -> None:
    storages = [torch.arange(5).untyped_storage(), torch.randn(11).untyped_storage()]
    whole = b"".join(bytes(s) for s in storages)
    for rank in range(3):
        config = FastFileWriterConfig(
            None, torch.empty(8, dtype=torch.uint8), num_parallel_writers=3, writer_rank=rank
        )
        writer = FastFileWriter(tmp_path / str(rank), config)
        writer.save_torch_storage_object_list(storages, save_size=False)
        writer.close()
    assert b"".join((tmp_path / str(rank)).read_bytes() for rank in range(3)) == whole


@pytest.mark.parametrize(
    "more", [["--read", "--validate"], ["--single_submit", "--io_parallel", "2"]]
)
def test_ds_io_measures_folders(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    io_command.main(
        ["--folder_to_device_mapping", f"{tmp_path}:0", "--io_size", "1M", "--loops", "1", *more]
    )
    assert "speed: " in (shown := capsys.readouterr().out) and " GB/sec" in shown
    assert list(tmp_path.iterdir()) == []
    for wrong in (["--gpu"], ["--engine", "torch_io"], ["--folder", "/nowhere"]):
        with pytest.raises(SystemExit, match="2"):
            io_command.main(["--io_size", "1M", "--folder", str(tmp_path), *wrong])


def test_hosts_and_slots() -> None:
    assert launcher.parse_inclusion_exclusion({"a": 4, "b": 2}, "a:1,3@b", "") == {
        "a": [1, 3],
        "b": [0, 1],
    }
    assert launcher.parse_node_config("a:0,2") == ("a", [0, 2])
    assert launcher.parse_node_config_list("a:2,0@b@a:1") == {"a": [0, 1, 2], "b": []}
    assert launcher.apply_num_nodes_and_gpus({"a": [1], "b": [2]}, 1, 2) == {"a": [0, 1]}
    assert launcher.encode_world_info({"a": [0]}) == "eyJhIjogWzBdfQ=="


def test_values_of_a_config() -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}},
    }
    read = config_readers
    assert read.get_train_batch_size(config) == 8
    assert read.get_optimizer_name(config) == "Adam"
    assert read.get_optimizer_gradient_clipping(config) == 0.5
    assert read.get_prescale_gradients(config) is False
    assert read.get_scheduler_name(config) is None
    assert read.get_communication_data_type({"communication_data_type": "bf16"}) is torch.bfloat16
    assert not hasattr(read, "get_nothing")


def test_units_of_several_ages() -> None:
    new = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 3)
    old = SimpleNamespace(get_model_parallel_rank=lambda: 2)
    assert (bwc.bwc_tensor_model_parallel_rank(new), bwc.bwc_tensor_model_parallel_rank(old)) == (
        3,
        2,
    )
    assert bwc.bwc_tensor_model_parallel_rank() == 0
    assert bwc.bwc_pipeline_parallel_world_size(old) == 1


def test_names_for_messages() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    debug_names.debug_extract_module_and_param_names(model)
    assert debug_names.debug_param2name(model[0].weight) == "0.weight"
    assert debug_names.debug_param2name(nn.Parameter(torch.ones(1))) == "unknown"
    assert debug_names.debug_module2name(model[0]) == "0"
    assert debug_names.debug_param2name_id_numel(model[0].bias) == "name=0.bias id=unknown numel=3"


def test_sizes_and_bandwidths() -> None:
    assert comms_text.convert_size(1536) == "1.5 KB"
    assert comms_text.calc_bw_log("broadcast", 1e6, 2.0) == (4.0, 4.0)
    with pytest.raises(ValueError, match="'brodcast' is no collective"):
        comms_text.calc_bw_log("brodcast", 1, 1)
    assert comms_text.get_caller_func(1) == "test_sizes_and_bandwidths"


def test_the_configs_of_the_ragged_engine() -> None:
    config = RaggedInferenceEngineConfig(tp={"tp_size": 2}, manager={"memory_config": {"size": 5}})  # type: ignore[arg-type]
    assert config.tensor_parallel.tp_size == 2
    assert config.state_manager.memory_config.size == 5
    with pytest.raises(
        ValueError, match="max_ragged_sequence_count 900 is more than max_ragged_batch_size"
    ):
        RaggedInferenceEngineConfig(manager={"max_ragged_sequence_count": 900})  # type: ignore[arg-type]


def test_an_engine_of_files_of_a_programs_own(tmp_path: Path) -> None:
    class Own(CheckpointEngine):
        def create(self, info: CheckpointCommitInfo) -> None:
            self.tag = info.tag

        def save(self, state_dict: Any, path: str) -> None:
            Path(path).write_text(state_dict)

        def load(self, path: str, map_location: Any = None) -> Any:
            return Path(path).read_text()

        def commit(self, info: CheckpointCommitInfo) -> bool:
            return self.tag == info.tag

    engine = Own()
    info = CheckpointCommitInfo("x", str(tmp_path), True)
    engine.create(info)
    engine.makedirs(str(tmp_path / "a"))
    engine.save("text", str(tmp_path / "a" / "file"))
    assert engine.load(str(tmp_path / "a" / "file")) == "text"
    assert engine.commit(info)
    assert engine.is_data_parallel_writer(0)


def test_throughput_of_whole_steps() -> None:
    timer = ThroughputTimer(SimpleNamespace(synchronized=False), batch_size=4, start_step=1)
    for step in range(3):
        for last in (False, True):
            timer.start()
            timer.stop(global_step=last)
        assert timer.global_step_count == step + 1
    assert timer.avg_samples_per_sec() == pytest.approx(2 * 4 / timer.total_elapsed_time)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def collectives() -> dict[str, Any]:
    from ds_deepspeed_compat.services.coalesced import reduce_scatter_coalesced
    from ds_deepspeed_compat.services.torch_backend import TorchBackend
    from ds_deepspeed_compat.utils.partitioned_tensor import PartitionedTensor

    from ds_core import comm

    comm.init_distributed("gloo")
    backend = TorchBackend("gloo", None, None)
    rank = backend.get_rank()
    ranks = backend.get_world_size()
    whole = torch.arange(21.0).view(3, 7)
    part = PartitionedTensor(whole, None)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data(), None)
    given = [torch.arange(5.0) + rank, torch.full((2, 4), float(rank))]
    parts = reduce_scatter_coalesced(given)
    total = torch.ones(2)
    backend.all_reduce(total)
    mean = (ranks - 1) / 2
    wanted = [
        t.flatten()[rank * -(-t.numel() // ranks) :][: -(-t.numel() // ranks)]
        for t in (torch.arange(5.0) + mean, torch.full((8,), mean))
    ]
    return {
        "whole": torch.equal(part.full(), whole) and torch.equal(again.full(), whole),
        "parts": all(torch.allclose(a, b) for a, b in zip(parts, wanted, strict=True)),
        "sum": total.tolist() == [float(ranks)] * 2,
    }


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_under_their_names(world: int) -> None:
    assert all(all(answers.values()) for answers in run_ranks(world, collectives)), (
        "see `collectives`"
    )
