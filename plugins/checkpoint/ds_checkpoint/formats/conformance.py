"""The conformance kit of checkpoint formats: `ds_checkpoint_formats`."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ds_checkpoint.formats.foreign import (
    CheckpointFormat,
    ForeignCheckpoint,
    Piece,
    in_memory,
    new_run,
)
from ds_checkpoint.offline import Saved
from ds_core.entries import resolve
from ds_core.errors import CheckpointError

_STEPS = 7
_GROUP = {"lr": 0.25, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.5}


def _tensors() -> dict[str, Tensor]:
    """Weights of two dtypes and odd shapes, and an optimizer's states of them."""
    made = torch.Generator().manual_seed(0)
    weights = {
        "layer.weight": torch.randn(5, 3, generator=made),
        "layer.bias": torch.randn(5, generator=made),
        "other.gain": torch.randn((), generator=made),
        "half": torch.randn(3, 2, 2, generator=made).bfloat16(),
    }
    found = {f"module/{name}": tensor for name, tensor in weights.items()}
    for name, tensor in weights.items():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{key}/{name}"] = torch.rand(tensor.shape, generator=made)
        found[f"optimizer/step/{name}"] = torch.tensor(float(_STEPS))
    # Buffers are no parameters: they have no states.
    return found | {"module/count": torch.arange(4)}


def _saved(folder: Path, tensors: dict[str, Tensor], give: Any = in_memory) -> Saved:
    """A checkpoint of them, of no program's."""
    params = [n.removeprefix("module/") for n in tensors if n.startswith("module/")][:-1]
    run = new_run() | {
        "global_steps": _STEPS,
        "micro_steps": _STEPS,
        "optimizer_groups": [dict(_GROUP)],
        "optimizer_params": [params],
    }
    pieces = [Piece(n, tuple(t.shape), t.dtype, give(t)) for n, t in tensors.items()]
    return ForeignCheckpoint(folder, "step7", pieces, run, optimizer="torch:AdamW").saved()


class CheckpointFormatConformance:
    """Inherit, and set the class attributes."""

    plugin: str = ""
    """Reference to the declaration module."""
    name: str = ""
    """The format's name."""
    optimizer: ClassVar[bool] = True
    """Whether it holds the optimizer's states, the groups' hyperparameters and the step."""
    one_dtype: ClassVar[bool] = False
    """Whether it has one dtype for all weights: then some may come back wider."""
    unread: ClassVar[tuple[str, ...]] = ()
    """Files that it writes for the other program, and does not read itself."""

    def made(self) -> CheckpointFormat:
        """The format, made of its entry."""
        entries = resolve(self.plugin).ds_checkpoint_formats()
        assert self.name in entries, f"{self.plugin} offers {sorted(entries)}, not {self.name!r}"
        entry = entries[self.name]
        assert entry.carries, f"the entry of {self.name!r} does not say what it carries"
        form = resolve(entry.load)()
        assert isinstance(form, CheckpointFormat), f"{entry.load} is no CheckpointFormat"
        return form

    def written(self, folder: Path) -> tuple[CheckpointFormat, Path]:
        """(the format, a checkpoint that it wrote and finds again)."""
        form = self.made()
        form.write(_saved(folder / "from", _tensors()), folder / "to")
        found = form.find(folder / "to", None)
        assert found is not None, f"{self.name} does not find what it wrote to {folder / 'to'}"
        return form, found

    def _files(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        return sorted(p for p in path.rglob("*") if p.is_file() and p.name not in self.unread)

    def test_it_finds_its_own_and_nothing_else(self, tmp_path: Path) -> None:
        """What it wrote; not an empty folder, a file of another kind, or what is not there."""
        self.written(tmp_path)
        form = self.made()
        (tmp_path / "empty").mkdir()
        (tmp_path / "some").mkdir()
        (tmp_path / "some" / "manifest.json").write_text("{}")
        (tmp_path / "file.txt").write_text("x")
        for other in ("empty", "some", "file.txt", "gone"):
            assert form.find(tmp_path / other, None) is None, f"it takes {other} for its own"
        assert form.find(tmp_path, "gone") is None, "it finds a tag that is missing"

    def test_tensors_come_back(self, tmp_path: Path) -> None:
        """Every weight bit for bit, in its dtype and shape; optimizer states where it has them."""
        form, path = self.written(tmp_path)
        with form.open(path) as foreign:
            saved = foreign.saved()
            known = set(saved.source.names())
            for name, want in _tensors().items():
                if name not in known and not self.optimizer and not name.startswith("module/"):
                    continue
                assert name in known, f"{name} is missing; there are {sorted(known)}"
                got = saved.source.whole(name)
                wider = self.one_dtype and got.is_floating_point()
                assert got.shape == want.shape and (wider or got.dtype == want.dtype), (
                    f"{name} is {got.dtype} {tuple(got.shape)}, was {want.dtype} {want.shape}"
                )
                want = want.to(got.dtype)
                assert torch.equal(got, want), f"{name} has other values"

    def test_ranges_are_parts_of_the_whole(self, tmp_path: Path) -> None:
        """A range of a state is that range of the flattened whole."""
        form, path = self.written(tmp_path)
        with form.open(path) as foreign:
            saved = foreign.saved()
            for name in saved.source.names():
                flat = saved.source.whole(name).reshape(-1)
                for start, stop in ((0, 0), (0, 1), (1, 3), (2, flat.numel())):
                    if stop <= flat.numel() and start <= stop:
                        part = saved.source.read(name, start, stop)
                        assert torch.equal(part, flat[start:stop]), f"{name}[{start}:{stop}]"

    def test_the_run_comes_back(self, tmp_path: Path) -> None:
        """The step and the groups' hyperparameters; or a note that says what is missing."""
        form, path = self.written(tmp_path)
        with form.open(path) as foreign:
            if not self.optimizer:
                assert foreign.missing, "it says nothing of what it has no place for"
                return
            assert foreign.run["global_steps"] == _STEPS
            [group] = foreign.run["optimizer_groups"]
            wrong = {k: group.get(k) for k, v in _GROUP.items() if group.get(k) != v}
            assert not wrong, f"the group's {wrong} were {_GROUP}"

    def test_what_is_there_is_left_alone(self, tmp_path: Path) -> None:
        """Writing where a checkpoint is raises CheckpointError, and changes nothing."""
        form, _ = self.written(tmp_path)
        before = _content(tmp_path / "to")
        with pytest.raises(CheckpointError):
            form.write(_saved(tmp_path / "from", _tensors()), tmp_path / "to")
        assert _content(tmp_path / "to") == before

    def test_a_failed_write_leaves_no_checkpoint(self, tmp_path: Path) -> None:
        """Where a tensor cannot be read half-way, nothing is found that is not whole."""

        def broken(tensor: Tensor) -> Any:
            read = in_memory(tensor)

            def give(start: int, out: Tensor) -> None:
                if tensor.dtype == torch.bfloat16:
                    raise CheckpointError("the disk is gone")
                read(start, out)

            return give

        form = self.made()
        with pytest.raises(CheckpointError, match="the disk is gone"):
            form.write(_saved(tmp_path / "from", _tensors(), broken), tmp_path / "to")
        found = form.find(tmp_path / "to", None)
        if found is not None:
            with pytest.raises(CheckpointError):
                _read_all(form, found)

    def test_one_state_is_in_memory(self, tmp_path: Path) -> None:
        """While a checkpoint is written, no more than two of its states are held."""
        alive: list[weakref.ref[Tensor]] = []
        most = 0

        def watched(tensor: Tensor) -> Any:
            read = in_memory(tensor)

            def give(start: int, out: Tensor) -> None:
                nonlocal most
                read(start, out)
                if out.numel() >= _BIG:
                    storage = out.untyped_storage()
                    alive.append(weakref.ref(storage))  # type: ignore[arg-type]
                    gc.collect()
                    most = max(most, sum(r() is not None for r in alive))

            return give

        big = {f"module/big{n}": torch.full((_BIG,), float(n)) for n in range(6)}
        tensors = big | {f"optimizer/exp_avg/big{n}": t for n, t in enumerate(big.values())}
        saved = _saved(tmp_path / "from", tensors | {"module/count": torch.arange(4)}, watched)
        self.made().write(saved, tmp_path / "to")
        assert most <= 2, f"{most} states were in memory at once"

    def test_files_that_are_cut_off_are_named(self, tmp_path: Path) -> None:
        """A CheckpointError that names the folder, for each file of which the second half is gone."""
        form, path = self.written(tmp_path)
        for file in self._files(path):
            kept = file.read_bytes()
            os.truncate(file, len(kept) // 2)
            if form.find(path, None) == path:
                said = _refusal(form, path, f"{file.name} without its second half")
                assert str(path) in said, f"{file.name}: {said}"
            file.write_bytes(kept)

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        """A CheckpointError, for each file that is a link to one elsewhere."""
        form, path = self.written(tmp_path)
        for number, file in enumerate(self._files(path)):
            elsewhere = tmp_path / f"elsewhere{number}"
            shutil.move(file, elsewhere)
            file.symlink_to(elsewhere)
            if form.find(path, None) == path:
                _refusal(form, path, f"{file.name} through a link")
            file.unlink()
            shutil.move(elsewhere, file)


_BIG = 4096


def _content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def _read_all(form: CheckpointFormat, path: Path) -> None:
    with ExitStack() as stack:
        saved = stack.enter_context(form.open(path)).saved()
        saved.source.verify(0, 1)
        for name in saved.source.names():
            saved.source.whole(name)


def _refusal(form: CheckpointFormat, path: Path, what: str) -> str:
    """The error of reading all of it."""
    try:
        _read_all(form, path)
    except CheckpointError as error:
        return str(error)
    pytest.fail(f"it reads {what}")
