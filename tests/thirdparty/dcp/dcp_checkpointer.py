"""Tensors in DCP's safetensors storage, values in JSON beside it; DCP's own metadata would be pickled."""

import json
import math
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.values import decode, encode
from ds_run_state import RunState, SavedRun

from ds_core.checkpointer import Checkpointer
from ds_core.errors import UsageError


class DcpCheckpointer(Checkpointer):
    def save(self, engine, folder, options):
        run, path = RunState(engine), Path(folder) / options.tag
        on_first_rank(f"cannot make {path}", lambda: path.mkdir(parents=True))
        on_every_rank(f"cannot save to {path}", lambda: self.write(run, path, options))
        if options.save_latest:
            on_first_rank(f"{path} is not the latest", lambda: path.with_name("latest").write_text(path.name))

    def write(self, run, path, options):
        excluded = run.frozen_states() if options.exclude_frozen_parameters else []
        pieces = {f"pieces/{run.rank}/{i}": piece for i, piece in enumerate(run.pieces(exclude=excluded))}
        if bad := [piece.name for piece in pieces.values() if piece.box or piece.held]:
            raise UsageError(f"{bad[0]} is cut along other axes than dp, which this checkpointer does not support")
        values = [run.common(), run.local(), dict(options.client_state or {})]
        row = {"values": encode(values, f"values/{run.rank}", tensors := {}, own=True), "excluded": excluded}
        row["pieces"] = {key: [p.name, p.shape, p.start, p.stop] for key, p in pieces.items()}
        tensors |= {key: p.values().detach().reshape(-1) for key, p in pieces.items()}
        writer = dcp.HuggingFaceStorageWriter(path, dict.fromkeys(tensors, run.rank + 1), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        (path / f"{run.rank:05d}.json").write_text(json.dumps(row))

    def load(self, engine, folder, options):
        if options.tag is None and not on_first_rank("cannot look", (Path(folder) / "latest").is_file):
            return None, {} if options.missing_ok else None
        run, path = RunState(engine), Path(folder) / (options.tag or (Path(folder) / "latest").read_text())
        saved, client = on_every_rank(f"cannot load {path}", lambda: self.read(run, States(path), options))[0]
        on_every_rank(f"loading {path} stopped half-way", lambda: run.restore(saved, options))
        return str(path), {} if options.module_only else client

    def read(self, run, states, options):
        own, excluded = run.rank < len(states.rows), states.rows[0]["excluded"]
        run.check(states, options, excluded=excluded)
        ranks = (states.rows[0], states.rows[run.rank * own])
        (common, _, client), (_, local, _) = (decode(row["values"], states.tensor, "values") for row in ranks)
        return SavedRun(states, common, local, own, len(states.rows), partial=bool(excluded)), client


class States:
    def __init__(self, path):
        self.path, self.pieces, self.shapes = path, {}, {}
        self.rows = [json.loads(file.read_text()) for file in sorted(path.glob("*.json"))]
        for key, (name, shape, start, stop) in (item for row in self.rows for item in row["pieces"].items()):
            self.pieces.setdefault(name, []).append((start, stop, key))
            self.shapes[name] = tuple(shape)
        self.names, self.shape = lambda: list(self.shapes), self.shapes.__getitem__
        self.metadata = dcp.HuggingFaceStorageReader(path).read_metadata().state_dict_metadata

    def tensor(self, key):
        out = {key: torch.empty(self.metadata[key].size, dtype=self.metadata[key].properties.dtype)}
        dcp.load(out, storage_reader=dcp.HuggingFaceStorageReader(self.path), no_dist=True)
        return out[key]

    def read(self, name, start=0, stop=None, *, into=None):
        stop = math.prod(self.shapes[name]) if stop is None else stop
        found = [piece for piece in sorted(self.pieces[name]) if piece[0] < stop and start < piece[1]]
        return torch.cat([self.tensor(k)[max(start - a, 0) : stop - a] for a, _, k in found or self.pieces[name][:1]])
