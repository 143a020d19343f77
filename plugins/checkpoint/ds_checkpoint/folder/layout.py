"""From each rank's pieces to full states: the rows that describe pieces, and how rank 0 merges
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ds_run_state.slices import Box
from ds_run_state.states import StateTensor

from ds_checkpoint.folder.format import Chunk, SavedState, check_coverage
from ds_checkpoint.folder.tensorfile import Item, dtype_name
from ds_core.errors import CheckpointError

Row = dict[str, Any]


def rows_of(pieces: Sequence[StateTensor], coord: Mapping[str, int], file: str) -> list[Row]:
    """Per piece what the manifest says of it; JSON.

    coord: this rank's place on the mesh.
    """
    return [
        {
            "name": piece.name,
            "at": {axis: coord[axis] for axis in piece.held},
            "shape": list(piece.shape),
            "dtype": dtype_name(piece.tensor.dtype, piece.name),
            "chunk": [file, key, piece.start, piece.stop],
            "box": None if piece.box is None else [piece.box.first, piece.box.size],
        }
        for key, piece in _keyed(pieces)
    ]


def items_of(pieces: Sequence[StateTensor]) -> list[Item]:
    """The same pieces as 1-d tensors to be written: flat, so that any range of them is one stretch
    of bytes.
    """
    return [
        (key, (p.tensor.numel(),), p.tensor.dtype, lambda piece=p: piece.values().reshape(-1))  # type: ignore[misc]
        for key, p in _keyed(pieces)
    ]


def _keyed(pieces: Sequence[StateTensor]) -> Iterator[tuple[str, StateTensor]]:
    """Each piece under its state's name; further pieces of one state add a number."""
    taken: Counter[str] = Counter()
    for piece in pieces:
        count = taken[piece.name]
        yield f"{piece.name}@{count}" if count else piece.name, piece
        taken[piece.name] += 1


def merge(rows: Iterable[Row]) -> tuple[SavedState, ...]:
    """All ranks' rows as states, in order of name.

    Raises CheckpointError when ranks disagree about one, or its pieces do not cover it once.
    """
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[Row]] = {}
    for row in rows:
        found.setdefault((row["name"], tuple(sorted(row["at"].items()))), []).append(row)
    states = []
    for (name, at), pieces in sorted(found.items()):
        # Every rank describes the whole state as it sees it, and they must see the same.
        first = pieces[0]
        for piece in pieces:
            if (piece["shape"], piece["dtype"]) != (first["shape"], first["dtype"]):
                raise CheckpointError(
                    f"ranks disagree about state {name!r}: {first['shape']} {first['dtype']} in "
                    f"{first['chunk'][0]}, "
                    f"{piece['shape']} {piece['dtype']} in {piece['chunk'][0]}"
                )
        chunks = sorted(
            map(_chunk, pieces), key=lambda c: (c.box.first if c.box else (), c.start, c.stop)
        )
        states.append(
            SavedState(name, dict(at), tuple(first["shape"]), first["dtype"], tuple(chunks))
        )
    # Before the commit: a state with a hole could never be loaded.
    check_coverage(states)
    return tuple(states)


def _chunk(row: Row) -> Chunk:
    box = row["box"]
    (file, key, start, stop) = row["chunk"]
    return Chunk(file, key, start, stop, None if box is None else Box(tuple(box[0]), tuple(box[1])))
