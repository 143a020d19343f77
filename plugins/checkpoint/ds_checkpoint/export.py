"""The whole model as one 16-bit safetensors file, and copies of tensors that drag no larger storage
along.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ds_run_state import RunState
from ds_run_state.slices import Box
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.folder import files
from ds_checkpoint.folder.boxes import moves
from ds_checkpoint.folder.contents import shared_names
from ds_checkpoint.folder.format import SavedState
from ds_checkpoint.folder.layout import merge, rows_of
from ds_checkpoint.folder.tensorfile import DTYPES, carry, check_tensor, write_tensors
from ds_checkpoint.storages.finding import check_path, shown
from ds_core import comm
from ds_core.errors import CheckpointError

log = logging.getLogger("ds_checkpoint")


def save_16bit_model(
    run: RunState,
    save_dir: str | os.PathLike[str],
    save_filename: str,
    exclude_frozen_parameters: bool,
) -> bool:
    """Write all weights and buffers to one safetensors file, by rank 0, atomically; True.

    Collective.

    False, with a warning, where the config says that the partitioner's weights are not to be
    gathered. Floating-point tensors wider than 16 bits become the run's 16-bit dtype (bfloat16 when
    it has none). Other names of shared tensors are in the metadata, where
    `safetensors.torch.load_model` looks for them. A name that ends in ``.bin`` becomes
    ``.safetensors``, with a warning: nothing is ever pickled. Raises CheckpointError on every rank
    when it fails on any.
    """
    action = f"cannot save the 16-bit model to {shown(save_dir)}"
    path = _path(action, save_dir, save_filename)
    if why := run.not_exported:
        if comm.rank() == 0:
            log.warning(
                "save_16bit_model has written nothing to %s: %s; set it to true", save_dir, why
            )
        return False
    plan, pieces, shared = _agree(action, run, exclude_frozen_parameters)
    # Rank 0 writes in order of falling item size; the others send in that order.
    dtypes = {state.name: _narrow(DTYPES[state.dtype], run) for state in plan}
    plan.sort(key=lambda state: -dtypes[state.name].itemsize)
    metadata = shared | {"format": "pt"}
    device = run.ctx.accelerator.current_device()

    def work() -> None:
        if comm.rank() == 0:
            _write(path, plan, pieces, dtypes, metadata, device)
        else:
            _send(plan, pieces, dtypes, device)

    on_first_rank(action, lambda: path.parent.mkdir(parents=True, exist_ok=True))
    on_every_rank(action, work)
    return True


def gather_model(engine: Any, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
    """All weights and buffers, whole, on the CPU of rank 0, in their own dtypes; None on the
    others. Collective.

    Shared tensors have all their names. Raises CheckpointError on every rank when it fails on any.
    """
    run = RunState(engine)
    action = "cannot gather the model"
    plan, pieces, shared = _agree(action, run, exclude_frozen_parameters)
    dtypes = {state.name: DTYPES[state.dtype] for state in plan}
    device = run.ctx.accelerator.current_device()

    def work() -> dict[str, Tensor] | None:
        if comm.rank() != 0:
            _send(plan, pieces, dtypes, device)
            return None
        return {
            state.name.removeprefix("module/"): _receive(
                state, pieces, dtypes[state.name], device
            ).view(state.shape)
            for state in plan
        }

    found, _ = on_every_rank(action, work, lambda prepared: None)
    return (
        None
        if found is None
        else found | {alias: found[name] for alias, name in shared.items() if name in found}
    )


def _agree(
    action: str, run: RunState, exclude_frozen: bool
) -> tuple[list[SavedState], dict[str, StateTensor], dict[str, str]]:
    """The whole states, this rank's pieces of them by key, and the other names of shared tensors.

    Collective.
    """
    (pieces, _), reports = on_every_rank(
        action, lambda: _pieces(run, exclude_frozen), lambda prepared: prepared[1]
    )
    plan, _ = on_every_rank(
        action, lambda: _plan(row for report in reports for row in report["rows"])
    )
    return (
        plan,
        pieces,
        {alias: name for report in reports for alias, name in report["shared"].items()},
    )


def _path(action: str, save_dir: str | os.PathLike[str], name: str) -> Path:
    if name.endswith(".bin"):
        if comm.rank() == 0:
            log.warning(
                "save_16bit_model writes safetensors: %s becomes %s",
                name,
                name[:-4] + ".safetensors",
            )
        name = name[:-4] + ".safetensors"
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(
            f"{action}: save_filename {name!r} must be a file name that ends in .safetensors"
        )
    try:
        return check_path(save_dir, "save_dir") / name
    except CheckpointError as error:
        raise CheckpointError(f"{action}: {error}") from None


def _pieces(run: RunState, exclude_frozen: bool) -> tuple[dict[str, StateTensor], dict[str, Any]]:
    """This rank's pieces of module tensors by their key, and what the others need to know of
    them."""
    left_out = set(run.frozen_states()) if exclude_frozen else set()
    mine = [
        p
        for p in run.states()
        if p.store
        and run.ctx.mesh.index(*p.copies) == 0
        and p.name.startswith("module/")
        and p.name not in left_out
    ]
    for piece in mine:
        check_tensor(piece.tensor, f"state {piece.name!r}")
    rows = rows_of(mine, run.ctx.mesh.coord, str(comm.rank()))
    shared = {a: n for a, n in shared_names(run.module).items() if f"module/{n}" not in left_out}
    by_key = {row["chunk"][1]: piece for row, piece in zip(rows, mine, strict=True)}
    return by_key, {"rows": rows, "shared": shared}


def _plan(rows: Any) -> list[SavedState]:
    """The whole states to be written; `Chunk.file` is the rank that has the piece."""
    plan = list(merge(rows))
    for before, after in itertools.pairwise(plan):
        if before.name == after.name:
            raise CheckpointError(
                f"{before.name!r} differs along mesh axes {', '.join(sorted(after.at))}, so it has "
                "no one value to "
                "write; use save_checkpoint"
            )
    return plan


def _narrow(dtype: torch.dtype, run: RunState) -> torch.dtype:
    if not dtype.is_floating_point or dtype.itemsize <= 2:
        return dtype
    precision = run.ctx.precision
    return (
        torch.float16 if torch.float16 in (precision.param, precision.autocast) else torch.bfloat16
    )


def _write(
    path: Path,
    plan: Sequence[SavedState],
    pieces: dict[str, StateTensor],
    dtypes: dict[str, torch.dtype],
    metadata: dict[str, str],
    device: torch.device,
) -> None:
    """Rank 0: take the pieces as they come, a state at a time, and write."""
    waiting = list(plan)

    def take() -> Tensor:
        state = waiting.pop(0)
        return _receive(state, pieces, dtypes[state.name], device)

    items = [(s.name.removeprefix("module/"), s.shape, dtypes[s.name], take) for s in plan]
    try:
        files.replace_with(path, lambda temporary: write_tensors(temporary, items, metadata))
    finally:
        while waiting:  # writing failed: the other ranks are still sending
            take()


def _receive(
    state: SavedState, pieces: Mapping[str, StateTensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Rank 0: a whole state, flat, of its own pieces and those that the others `_send`."""
    out = torch.empty(state.numel, dtype=dtype)
    for chunk in state.chunks:
        if chunk.file == "0":
            part = pieces[chunk.key].values().detach().reshape(-1)
        else:
            part = torch.empty(chunk.stop - chunk.start, dtype=dtype, device=device)
            comm.recv(part, src=int(chunk.file))
        part = part.cpu().contiguous()
        box = chunk.within(state.shape)
        place = (chunk.start, chunk.stop)
        for move in moves(box, place, Box.whole(state.shape), (0, state.numel)):
            carry(move, part, out)
    return out


def _send(
    plan: Sequence[SavedState],
    pieces: Mapping[str, StateTensor],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> None:
    """Another rank: send its pieces to rank 0, in the plan's order."""
    for state in plan:
        for chunk in state.chunks:
            if chunk.file == str(comm.rank()):
                tensor = pieces[chunk.key].values().detach()
                comm.send(tensor.reshape(-1).to(device, dtypes[state.name]), dst=0)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` with every tensor in it (through lists, tuples and dicts) copied to `device`.

    A copy has a storage of its own size, so that what is saved is the tensor and not the buffer it
    is a view of.
    """
    if isinstance(item, Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(v, device) for v in item))
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(v, device) for v in item)
    if isinstance(item, dict):
        return type(item)((k, clone_tensors_for_torch_save(v, device)) for k, v in item.items())
    return item
