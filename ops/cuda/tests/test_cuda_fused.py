"""The fused operations: formulas against torch's own gradients, and the CUDA sources, emulated,
against both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ds_ops_cuda import formulas, fused, references
from torch import Tensor

from ds_core.errors import UsageError

F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
F64 = torch.float64


def words(*numbers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (torch.tensor(n) for n in numbers)
    return a, b, c, d


def test_philox_gives_the_published_values() -> None:
    """The known answers of Random123's philox4x32 with 10 rounds."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, answer in known:
        assert tuple(int(w) for w in references.philox(words(*counter), key)) == answer


def test_dropout_keeps_its_share_and_its_mean() -> None:
    for p in (0.1, 0.5, 0.9):
        kept = references.keep_mask(600, 1001, p, seed=11).double()
        assert abs(kept.mean().item() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
        assert references.dropout(torch.ones(600, 1001), p, 11).mean().item() == pytest.approx(
            1, abs=0.03
        )
    a, b = (references.keep_mask(300, 300, 0.5, seed) for seed in (1, 2))
    assert abs((a == b).double().mean().item() - 0.5) < 0.01, "masks of two seeds go together"
    assert torch.equal(references.keep_mask(7, 9, 0.0, 3), torch.ones(7, 9, dtype=torch.bool))
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            references.dropout(torch.ones(2, 2), wrong, 0)


def test_seeds_come_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first = [references.draw_seed(), references.draw_seed(), references.draw_seed(5)]
    torch.manual_seed(3)
    assert first == [references.draw_seed(), references.draw_seed(), references.draw_seed(5)]
    torch.manual_seed(3)
    assert references.draw_seed(1) != first[0] and len(set(first)) == 3
    assert all(0 <= s < 2**63 for s in first)


def cases(
    dtype: torch.dtype, cols: int = 7, *, d: int = 4
) -> Iterator[tuple[str, Any, Any, list[Tensor]]]:
    """Name, fused function, its reference, and inputs that all want gradients."""
    torch.manual_seed(cols)

    def make(*shape: int, base: float = 0.0) -> Tensor:
        return (torch.randn(*shape) * (0.1 if base else 1) + base).to(dtype).requires_grad_()

    x = make(3, 5, cols)
    bias = make(cols)
    weight = make(cols, base=1.0)
    for form in ("tanh", "none"):
        own: dict[str, Any] = {"approximate": form}
        yield f"gelu {form}", part(fused.bias_gelu, own), part(references.bias_gelu, own), [x, bias]
        out = make(4, cols)
        for recompute in (False, True):
            linear = part(fused.gelu_linear, own | {"recompute": recompute})
            yield (
                f"linear {recompute}",
                linear,
                lambda a, b, w, own=own: references.bias_gelu(a, b, **own) @ w.t(),
                [
                    x,
                    bias,
                    out,
                ],
            )
    small = (bias.detach() / 4).requires_grad_()
    for invertible in (False, True):
        own = {"eps": 1e-5, "invertible": invertible}
        yield (
            f"norm {invertible}",
            part(fused.layer_norm, own),
            part(references.layer_norm, own),
            [x, weight, small],
        )
    scores = make(2, 3, 5, cols)
    value = make(2, 3, cols, d)
    other = make(3, 5, cols)
    masks = [
        None,
        torch.randn(2, 1, 1, cols),
        torch.randn(5, cols).t().contiguous().t(),
        torch.randn(2, 3, 5, 1),
    ]
    for i, (p, mask) in enumerate((p, m) for p in (0.0, 0.4) for m in masks):
        own = {"p": p, "seed": 2**61 + 12345 + i}
        if mask is not None:
            mask[..., 0] -= 5
        softmax = part(fused.softmax_dropout, {"mask": mask, **own})
        plain = part(references.softmax_dropout, {"mask": mask, **own})
        yield f"softmax {p}", softmax, plain, [scores]
        for recompute in (False, True):
            attend = part(attention, {"mask": mask, "recompute": recompute, **own})
            yield f"attention {p}", attend, lambda s, v, plain=plain: plain(s) @ v, [scores, value]
        add = part(fused.bias_dropout_add, own), part(references.bias_dropout_add, own)
        yield f"add {p}", *add, [x, bias, other]


def attention(scores: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    return fused.attention(scores, mask, value, **options)


def part(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    return lambda *given: function(*given, **options)


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    out = function(*inputs)
    torch.manual_seed(9)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.dtype))]


def test_formulas_equal_torchs_own_gradients_in_fp64() -> None:
    for name, function, reference, inputs in cases(F64):
        for got, wanted in zip(
            gradients(function, inputs), gradients(reference, inputs), strict=True
        ):
            torch.testing.assert_close(
                got, wanted, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


DTYPES = [F32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (BF16, F16))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("on", ["plain torch", pytest.param("kernels", marks=pytest.mark.slow)])
def test_fused_equal_their_references(
    on: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Odd and even rows, a warp's and a block's."""
    called = request.getfixturevalue("device") if on == "kernels" else []
    tolerance = {F32: (2e-5, 2e-5), BF16: (2**-6, 0.06), F16: (2**-9, 0.008)}[dtype]
    for cols in (7, 64, 1100) if on == "kernels" else (7, 64):
        for name, function, reference, inputs in cases(dtype, cols):
            both = zip(gradients(function, inputs), gradients(reference, inputs), strict=True)
            for place, (got, wanted) in enumerate(both):
                assert got.dtype == wanted.dtype and got.shape == wanted.shape
                torch.testing.assert_close(
                    got,
                    wanted,
                    rtol=tolerance[0],
                    atol=tolerance[1] * max(1.0, wanted.abs().max().item() ** 0.5),
                    msg=lambda m, n=name, c=cols, i=place: f"{n} at {c} columns, result {i}: {m}",
                )
    assert (set(called) >= {"column_sums", "softmax_dropout_backward", "layer_norm_sums"}) == (
        on == "kernels"
    )


def test_kernels_draw_the_references_bits(device: list[str]) -> None:
    x = torch.ones(67, 41)
    for p, seed in ((0.5, 1), (0.1, 2**62 - 3), (0.999999, 7)):
        dropped = fused.bias_dropout_add(x, torch.zeros(41), torch.zeros(67, 41), p=p, seed=seed)
        assert torch.equal(dropped, references.dropout(x, p, seed))
    assert set(device) == {"bias_dropout_add_forward"}


def test_rows_without_elements(device: list[str]) -> None:
    for shape in ((0, 8), (2, 0, 8)):
        x = torch.randn(shape, requires_grad=True)
        b = torch.ones(8, requires_grad=True)
        for y in (
            fused.bias_gelu(x, b),
            fused.layer_norm(x, b, b, eps=1e-5),
            fused.bias_dropout_add(x, b, torch.zeros(shape), p=0.5, seed=1),
        ):
            (db,) = torch.autograd.grad(y.sum(), b)
            assert y.shape == shape and torch.equal(db, torch.zeros(8))


@pytest.mark.parametrize("deterministic", [True, False])
def test_sums_of_many_rows(deterministic: bool, device: list[str]) -> None:
    """More rows than one chunk, in either way of adding up."""
    torch.manual_seed(0)
    x = torch.randn(1001, 37, requires_grad=True)
    w = torch.rand(37, requires_grad=True)
    b = torch.zeros(37)
    b.requires_grad_()
    got = gradients(
        lambda *a: fused.layer_norm(*a, eps=1e-5, deterministic=deterministic), [x, w, b]
    )
    wanted = gradients(lambda *a: references.layer_norm(*a, eps=1e-5), [x, w, b])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    got = gradients(lambda *a: fused.bias_gelu(*a, deterministic=deterministic), [x, b])
    wanted = gradients(references.bias_gelu, [x, b])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def saved(function: Callable[[], Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function()
    return [*kept, out]


def test_invertible_keeps_the_output_and_not_the_input() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    w = torch.ones(8)
    b = torch.zeros(8)
    for invertible in (True, False):
        *kept, out = saved(lambda i=invertible: fused.layer_norm(x, w, b, eps=1e-5, invertible=i))
        places = {t.data_ptr() for t in kept}
        assert (out.data_ptr() in places, x.data_ptr() in places) == (invertible, not invertible)


def test_invertible_keeps_the_input_where_the_output_does_not_tell_it() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    for w, b in (
        (torch.tensor([0.0] + [1.0] * 7), torch.zeros(8)),
        (torch.full((8,), 0.01), torch.ones(8)),
    ):
        w = w.clone().requires_grad_()
        b = b.clone().requires_grad_()
        got = gradients(lambda *a: fused.layer_norm(*a, eps=1e-5, invertible=True), [x, w, b])
        wanted = gradients(lambda *a: references.layer_norm(*a, eps=1e-5), [x, w, b])
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_recomputing_keeps_less_and_gives_the_same_bits() -> None:
    x = torch.randn(9, 64, requires_grad=True)
    b = torch.randn(64)
    w = torch.randn(5, 64)
    kept = [saved(lambda r=r: fused.gelu_linear(x, b, w, recompute=r)) for r in (False, True)]
    assert len(kept[0]) == len(kept[1]) + 1
    s = torch.randn(2, 2, 9, 9, requires_grad=True)
    v = torch.randn(2, 2, 9, 4)
    kept = [
        saved(lambda r=r: fused.attention(s, None, v, p=0.3, seed=4, recompute=r))
        for r in (False, True)
    ]
    assert len(kept[0]) == len(kept[1]) + 1
    v.requires_grad_()
    each = [
        gradients(lambda s, v, r=r: fused.attention(s, None, v, p=0.3, seed=4, recompute=r), [s, v])
        for r in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*each, strict=True))


def test_masks_and_shapes_that_do_not_fit_are_refused() -> None:
    s = torch.zeros(2, 3, 4, 5)
    for mask in (
        torch.zeros(2, 4),
        torch.zeros(5, dtype=torch.bool),
        torch.zeros(7, 2, 3, 4, 5),
        torch.zeros(4, 1, 1, 5),
    ):
        with pytest.raises(UsageError, match="an additive mask of floats"):
            fused.softmax_dropout(s, mask)
    with pytest.raises(UsageError, match=r"pass mask\.detach\(\)"):
        fused.softmax_dropout(s, torch.zeros(5, requires_grad=True))
    with pytest.raises(UsageError, match=r"bias is \[4\], x is \[2, 5\]"):
        fused.bias_gelu(torch.zeros(2, 5), torch.zeros(4))
    with pytest.raises(UsageError, match="they must be the same"):
        fused.bias_dropout_add(torch.zeros(2, 5), torch.zeros(5), torch.zeros(2, 5).half())


def test_a_row_that_is_masked_whole_is_not_a_number_as_in_torch(device: list[str]) -> None:
    mask = torch.zeros(1, 1, 2, 5)
    mask[..., 1, :] = -torch.inf
    got = fused.softmax_dropout(torch.zeros(1, 1, 2, 5), mask)
    assert got[0, 0, 1].isnan().all()
    assert torch.equal(got[0, 0, 0], torch.full((5,), 0.2))


def test_tensors_that_kernels_do_not_take_go_by_formulas(device: list[str]) -> None:
    x = torch.randn(3, 8, dtype=F64)
    assert torch.equal(
        fused.bias_gelu(x, torch.zeros(8)), formulas.bias_gelu_forward(x, torch.zeros(8), "tanh")
    )
    assert not device


def test_torch_serves_and_says_so_where_no_kernel_can(
    device: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "available", lambda: "a reason for this test")
    for _ in range(2):
        fused.bias_gelu(torch.zeros(2, 4), torch.zeros(4))
    assert not device
    assert [r.getMessage() for r in caplog.records] == [
        "fused operations run on plain torch: a reason for this test"
    ]
