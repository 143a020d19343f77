"""The perturbed reference: every weight by about a unit in its last place, the same in any layout."""

from __future__ import annotations

import pytest
import torch
from ds_verify.recording.replay import _CYCLE, _perturb


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_element_moves_by_a_unit_and_parts_as_the_whole(dtype: torch.dtype) -> None:
    size = 2 * _CYCLE + 1000
    eps = torch.finfo(dtype).eps
    before = torch.rand(size).to(dtype) + 1
    whole = before.clone()
    _perturb(whole, eps, 12_345)
    moved = ((whole - before).double() / before.double()).abs() / eps
    assert float(moved.min()) > 0.3
    assert float(moved.max()) < 2
    up = float((whole > before).double().mean())
    assert 0.45 < up < 0.55
    for start, stop in ((0, 10), (_CYCLE - 12_345 - 5, _CYCLE - 12_345 + 5), (900_000, size)):
        part = before[start:stop].clone()
        _perturb(part, eps, 12_345, start)
        assert torch.equal(part, whole[start:stop])
    columns = before[:12].clone().view(3, 4).t()
    _perturb(columns, eps, 12_345)
    assert torch.equal(columns.reshape(-1).sign(), torch.ones(12, dtype=dtype))
    assert not bool((columns == before[:12].view(3, 4).t()).any())
