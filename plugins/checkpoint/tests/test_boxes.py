"""Boxes: what of one flattened box goes where in another, against indices counted one by one."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from ds_checkpoint.folder.boxes import form_grid, moves
from ds_checkpoint.folder.tensorfile import TensorFile, carry, write_tensors
from ds_run_state.slices import Box
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Box, tuple[int, int]]:
    first = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(draw(st.integers(0, n - f)) for f, n in zip(first, shape, strict=True))
    whole_from = draw(st.integers(0, len(shape)))  # often all of the inner dimensions
    first = (*first[:whole_from], *(0 for _ in shape[whole_from:]))
    box = Box(first, (*size[:whole_from], *shape[whole_from:]))
    start = draw(st.integers(0, box.numel))
    return box, (start, draw(st.integers(start, box.numel)))


@st.composite
def pairs(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[Box, tuple[int, int]], tuple[Box, tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    return shape, draw(boxes(shape)), draw(boxes(shape))


@given(pairs())
def test_every_element_goes_where_it_belongs(given_: object) -> None:
    shape, (source, held), (target, wanted) = given_  # type: ignore[misc]
    # Every element of the array is its own number.
    array = torch.arange(1, math.prod(shape) + 1).view(shape)
    values = array[source.slices()].reshape(-1)[slice(*held)]
    out = torch.zeros(wanted[1] - wanted[0], dtype=torch.int64)
    moved = 0
    for move in moves(source, held, target, wanted):
        carry(move, values, out)
        moved += move.rows * move.length
    right = array[target.slices()].reshape(-1)[slice(*wanted)]
    assert torch.equal(
        out, right.where(torch.isin(right, values), torch.zeros(1, dtype=torch.int64))
    )
    assert moved == int((out != 0).sum()), "something is moved twice"


@given(pairs(), st.data())
def test_a_box_may_lie_in_an_array_beside_others(given_: object, data: st.DataObject) -> None:
    shape, (source, held), (target, _) = given_  # type: ignore[misc]
    array = torch.arange(1, math.prod(shape) + 1).view(shape)
    at = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    within = tuple(
        a + n + data.draw(st.integers(0, 2)) for a, n in zip(at, target.size, strict=True)
    )
    start = data.draw(st.integers(0, math.prod(within)))
    stop = data.draw(st.integers(start, math.prod(within)))
    values = array[source.slices()].reshape(-1)[slice(*held)]
    out = torch.zeros(stop - start, dtype=torch.int64)
    right = torch.zeros(within, dtype=torch.int64)
    for move in moves(source, held, target, (start, stop), at=at, within=within):
        carry(move, values, out)
    right[Box(at, target.size).slices()] = array[target.slices()]
    right = right.where(torch.isin(right, values), torch.zeros(1, dtype=torch.int64))
    assert torch.equal(out, right.reshape(-1)[start:stop])


def test_values_may_lie_anywhere_in_memory() -> None:
    whole = Box.whole((5,))
    for values in (torch.arange(10.0)[::2], torch.ones(1).expand(5)):
        out = torch.zeros(5)
        for move in moves(whole, (0, 5), whole, (0, 5)):
            carry(move, values, out)
        assert torch.equal(out, values)


def test_rows_are_one_move_and_ranges_one_stretch() -> None:
    whole = Box.whole((6, 4, 5))
    assert len(list(moves(whole, (0, 120), Box((2, 0, 0), (3, 4, 5)), (0, 60)))) == 1
    columns = list(moves(whole, (0, 120), Box((0, 0, 1), (6, 4, 2)), (0, 48)))
    assert [(m.rows, m.length, m.source_step, m.target_step) for m in columns] == [(24, 2, 5, 2)]
    # A range that begins and ends inside a row: its rest, whole rows, the beginning of the last.
    assert [
        m.rows * m.length for m in moves(whole, (0, 120), Box((0, 0, 1), (6, 4, 2)), (3, 20))
    ] == [1, 16]
    assert list(moves(Box.whole(()), (0, 1), Box.whole(()), (0, 1))) == [(0, 0, 1, 1, 1, 1)]


def test_rows_are_read_from_a_file_however_long_they_are(tmp_path: Path) -> None:
    values = torch.arange(700 * 3000, dtype=torch.float32)
    write_tensors(
        tmp_path / "x.safetensors", [("x", (values.numel(),), values.dtype, lambda: values)], {}
    )
    file = TensorFile(tmp_path / "x.safetensors")
    for first, size in (
        ((5, 100), (690, 3)),
        ((5, 100), (690, 1500)),
        ((0, 0), (700, 1)),
        ((1, 1), (1, 2999)),
    ):
        box = Box(first, size)
        out = torch.zeros(box.numel)
        before = file.bytes_read
        for move in moves(Box.whole((700, 3000)), (0, values.numel()), box, (0, box.numel)):
            file.read_move("x", move, out)
        assert torch.equal(out, values.view(700, 3000)[box.slices()].reshape(-1)), (first, size)
        if size[1] >= 1024:  # of long rows nothing else is read
            assert file.bytes_read - before == 4 * box.numel
    file.close()


def test_a_grid_fills_its_array() -> None:
    shape = (4, 6)
    cells = [Box((r, c), (h, w)) for r, h in ((0, 1), (1, 3)) for c, w in ((0, 2), (2, 0), (2, 4))]
    assert (
        form_grid(cells, shape)
        and form_grid([Box.whole(shape)], shape)
        and form_grid([Box((), ())], ())
    )
    for wrong in (
        cells[1:],
        [*cells, cells[0]],
        [Box((0, 0), (4, 6)), Box((0, 0), (4, 5))],
        [Box((0, 0), (4, 5))],
        [Box((0, 0), (4, 7))],
        [Box((0,), (4,))],
        [Box((0, 0), (2, 6)), Box((2, 0), (2, 3)), Box((2, 3), (2, 3))],  # fills it, but is no grid
        [],
    ):
        assert not form_grid(wrong, shape), wrong
