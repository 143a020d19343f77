"""Checkpoints in DeepSpeed's own forms.

That real DeepSpeed loads them is tested in test_deepspeed.py (slow).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_checkpoint import get_fp32_state_dict_from_zero_checkpoint as plain_state_dict
from ds_checkpoint.offline import differences, open_saved
from ds_checkpoint_deepspeed import export_deepspeed, export_universal, import_checkpoint
from ds_checkpoint_deepspeed.ds_to_universal import main as ds_to_universal
from ds_checkpoint_deepspeed.opened import open_any
from ds_checkpoint_deepspeed.ranks.state_files import get_model_state_file, get_optim_files
from ds_checkpoint_deepspeed.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from ds_checkpoint_deepspeed.zero_to_fp32 import main as zero_to_fp32
from ds_command_kit.app import make_app
from ds_moe import MoE
from ds_testing import run_ranks
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import ds_core
from ds_core.errors import CheckpointError

HERE = Path(__file__).parent / "deepspeed"


def differing(first: Path, second: Path) -> list[str]:
    with open_saved(first) as one, open_saved(second) as two:
        assert (
            one.manifest.shared == two.manifest.shared
            and one.manifest.frozen == two.manifest.frozen
        )
        return [f"{d.name}: {d.kind} {d.detail}" for d in differences(one, two)]


@pytest.mark.fast_cases(
    "fp32-2-1", "bf16-3-0", "bf16-3-2", "bf16-3-universal", "parallel/moe-1-0", "parallel/pipe-1-3"
)
@pytest.mark.parametrize("form", ["0", "1", "2", "3", "universal"])
@pytest.mark.parametrize("name", ["fp32-2", "bf16-3", "parallel/moe-1", "parallel/pipe-1"])
def test_what_is_exported_is_imported_again(name: str, form: str, tmp_path: Path) -> None:
    import_checkpoint(HERE / name, tmp_path / "a")
    if form == "universal":
        path = export_universal(tmp_path / "a", tmp_path / "b" / "three")
        assert (tmp_path / "b" / "latest_universal").read_text() == "three"
    elif form == "0" and name == "bf16-3":
        with pytest.raises(CheckpointError, match="export for stage 1"):
            export_deepspeed(tmp_path / "a", tmp_path / "b", stage=0)
        return
    else:
        path = export_deepspeed(
            tmp_path / "a", tmp_path / "b", stage=int(form), world_size=3 if form > "0" else 1
        )
        assert (tmp_path / "b" / "latest").read_text() == "three"
    assert path == tmp_path / "b" / "three"
    if (name, form) == ("fp32-2", "0"):
        return  # its optimizer states have no names
    # a file of the whole model has no layers' files, so it names no pipeline
    if name != "parallel/pipe-1":
        import_checkpoint(tmp_path / "b", tmp_path / "c")
        assert differing(tmp_path / "a", tmp_path / "c") == []
    theirs = get_fp32_state_dict_from_zero_checkpoint(HERE / name)
    again = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "b")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(again[n], t) for n, t in theirs.items())


def test_the_functions_serve_both_kinds_of_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_checkpoint(HERE / "fp32-3", tmp_path / "ours")
    want = plain_state_dict(tmp_path / "ours")
    for number, folder in enumerate((tmp_path / "ours", HERE / "fp32-3")):
        found = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert found.keys() == want.keys() and all(
            torch.equal(found[n], t) for n, t in want.items()
        )
        lazy = get_fp32_state_dict_from_zero_checkpoint(
            folder, "three", exclude_frozen_parameters=True, lazy_mode=True
        )
        assert lazy.keys() == want.keys() - {"frozen.weight"}
        assert all(
            torch.equal(t.contiguous(), want[n]) and t.shape == want[n].shape
            for n, t in lazy.items()
        )
        caplog.clear()
        written = convert_zero_checkpoint_to_fp32_state_dict(
            folder, tmp_path / f"w{number}", safe_serialization=False
        )
        assert [path.name for path in written] == ["model.safetensors"]
        assert [
            r.getMessage()
            for r in caplog.records
            if "safetensors files are written" in r.getMessage()
        ]
        zero_to_fp32([str(folder), str(tmp_path / f"x{number}"), "--dtype", "bf16", "-t", "three"])
        assert (
            load_file(tmp_path / f"x{number}" / "model.safetensors")["mid.weight"].dtype
            == torch.bfloat16
        )
        ds_to_universal(
            [
                "--input_folder",
                str(folder / "three"),
                "--output_folder",
                str(tmp_path / f"u{number}" / "t"),
            ]
        )
        assert (tmp_path / f"u{number}" / "t" / "zero" / "emb.weight" / "exp_avg_sq.pt").is_file()
    with pytest.raises(SystemExit, match="zero_to_fp32: .*is no checkpoint"):
        zero_to_fp32([str(tmp_path), str(tmp_path / "y")])


def test_experts_load_into_a_module_under_either_name() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=3)
    weights = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
    theirs = {"deepspeed_moe.gate.wg.weight": weights["gate.wg.weight"]}
    for row in range(3):
        for kind in ("weight", "bias"):
            name = f"deepspeed_moe.experts.deepspeed_experts.{row}.{kind}"
            theirs[name] = weights[f"experts.stacked.{kind}"][row]
    net = nn.ModuleDict({"a": layer})
    net.load_state_dict({f"a.{k}": v for k, v in theirs.items()})
    assert all(torch.equal(v, weights[k]) for k, v in layer.state_dict().items())
    del theirs["deepspeed_moe.experts.deepspeed_experts.1.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts\.stacked\.bias"):
        layer.load_state_dict(theirs)


def test_a_moe_checkpoint_loads_into_a_module(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 8)
            self.head = nn.Linear(8, 5)
            self.moe = MoE(8, nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), num_experts=4)

    theirs = get_fp32_state_dict_from_zero_checkpoint(HERE / "parallel" / "moe-1")
    net = load_state_dict_from_zero_checkpoint(Net(), HERE / "parallel" / "moe-1")
    row = theirs["moe.deepspeed_moe.experts.deepspeed_experts.3.1.bias"]
    assert torch.equal(net.state_dict()["moe.experts.stacked.1.bias"][3], row)


def trains(folder: str, stage: int) -> list[str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    groups = [
        {"params": [net[2].weight, net[0].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[2].bias]},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = ds_core.initialize(model=net, model_parameters=groups, config=config)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, "one")
    engine.destroy()
    return []


def test_parameters_keep_the_order_of_their_groups(tmp_path: Path) -> None:
    """Engines of DeepSpeed take states by place."""
    run_ranks(2, trains, str(tmp_path / "a"), 3)
    folder = export_deepspeed(tmp_path / "a", tmp_path / "b", stage=1)
    saved = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert [list(group) for group in saved["param_shapes"]] == [
        ["2.weight", "0.weight"],
        ["0.bias", "2.bias"],
    ]


def test_commands(tmp_path: Path) -> None:
    def dscore(*words: Any) -> Any:
        return CliRunner().invoke(make_app(), ["checkpoint", *map(str, words)], prog_name="dscore")

    assert dscore("import", HERE / "fp32-1", tmp_path / "a").exit_code == 0
    done = dscore("export-deepspeed", tmp_path / "a", tmp_path / "b", "--stage", 3, "--ranks", 2)
    assert done.exit_code == 0 and done.output.strip() == str(tmp_path / "b" / "three")
    # it is there
    assert dscore("export-deepspeed", tmp_path / "a", tmp_path / "b", "--stage", 3).exit_code == 1
    assert (
        dscore("export-deepspeed", tmp_path / "b", tmp_path / "c" / "u", "--universal").exit_code
        == 0
    )
    assert (tmp_path / "c" / "u" / "zero" / "mid.weight" / "fp32.pt").is_file()


def test_tensor_parallel_slices_of_unknown_cuts_are_named(tmp_path: Path) -> None:
    with open_any(HERE / "parallel" / "tp-1") as saved:
        assert saved.split[:2] == ("bias", "down")
    with pytest.raises(CheckpointError, match="bias, down, .* differ along mesh axes"):
        export_deepspeed(HERE / "parallel" / "tp-1", tmp_path)


def test_files_name_no_class_but_those_that_deepspeed_writes(tmp_path: Path) -> None:
    """Nothing here has to have them."""
    folder = export_deepspeed(HERE / "fp32-2", tmp_path, stage=1)
    named = {
        n
        for path in folder.iterdir()
        for n in torch.serialization.get_unsafe_globals_in_checkpoint(path)
    }
    assert named == {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }


@pytest.mark.fast_cases("../../../out", "a//b")
@pytest.mark.parametrize("name", ["../../../out", "/{root}/out", "a/../../out", "a//b"])
def test_a_name_that_leads_out_of_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint whose checksums are right, and of DeepSpeed's own files."""
    name = name.format(root=tmp_path)
    torch.save({name: torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="is the path of a file, and no name"):
        import_checkpoint(tmp_path / "w.pt", tmp_path / "a")
    with monkeypatch.context() as context:  # as a program of a stranger's would write it
        context.setattr("ds_checkpoint.folder.format.check_name", lambda name: name)
        import_checkpoint(tmp_path / "w.pt", tmp_path / "a")
    runner = CliRunner()
    words = (
        ["verify", "a"],
        ["export-deepspeed", "a", "to/deep/down", "--universal"],
        ["export", "a", "to2"],
    )
    for asked in words:
        done = runner.invoke(
            make_app(), ["checkpoint", *(w.replace("a", f"{tmp_path}/a", w == "a") for w in asked)]
        )
        assert done.exit_code == 1 and "path of a file" in done.output, done.output
    assert not list(tmp_path.rglob("*out*")) and not list(tmp_path.rglob("fp32.pt"))

    folder = tmp_path / "theirs" / "t"
    folder.mkdir(parents=True)
    torch.save(
        {"module": {name: torch.ones(2)}, "param_shapes": None},
        folder / "mp_rank_00_model_states.pt",
    )
    with pytest.raises(CheckpointError, match="is the path of a file"):
        export_universal(folder, tmp_path / "to" / "t")
    assert not list(tmp_path.rglob("*out*"))


def test_weights_alone_are_exported(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(3, 2), "count": torch.tensor(3)}
    torch.save(weights, tmp_path / "w.pt")
    import_checkpoint(tmp_path / "w.pt", tmp_path / "a")
    export_universal(tmp_path / "a", tmp_path / "u" / "t")
    export_deepspeed(tmp_path / "a", tmp_path / "z", stage=2, world_size=2)
    for folder in ("u", "z"):
        import_checkpoint(tmp_path / folder, tmp_path / f"back-{folder}", tag="t")
        assert differing(tmp_path / "a", tmp_path / f"back-{folder}") == []


def test_files_that_other_programs_open(tmp_path: Path) -> None:
    """As Lightning's converter reads a checkpoint: its client state out of files that it looks for
    by name.
    """
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine = ds_core.initialize(model=nn.Linear(2, 2), config=config)[0]
    engine.save_checkpoint(tmp_path, "one", client_state={"epoch": 3, "table": torch.arange(3)})
    engine.destroy()
    optim = torch.load(get_optim_files(tmp_path / "one")[0], weights_only=True)
    stage = optim["optimizer_state_dict"]["zero_stage"]
    client = torch.load(get_model_state_file(tmp_path / "one", stage), weights_only=True)
    assert client["epoch"] == 3
    assert torch.equal(client["table"], torch.arange(3))
    assert list((tmp_path / "one").glob("*.pt")) == []
    theirs = get_optim_files(HERE / "fp32-2" / "three")
    assert [Path(file).name[:14] for file in theirs] == ["zero_pp_rank_0", "zero_pp_rank_1"]
    with pytest.raises(FileNotFoundError, match="is no folder"):
        get_optim_files(tmp_path / "two")
