"""The operations of quantisation over compiled code: checks, room for what comes out, addresses and
sizes.

What compiled code does not take goes to the reference, which means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ds_kernel_kit import references
from ds_kernel_kit.marshal import (
    quantized_parts,
    quantized_rows,
    room_for_quantized,
    room_for_values,
)
from ds_kernel_kit.references import Quantized


class QuantizedOperations(NamedTuple):
    """See the functions of these names in `ds_kernel_kit.references`; the same bits."""

    quantize: Callable[..., Quantized]
    dequantize: Callable[..., Tensor]
    dequantize_sum: Callable[..., Tensor]
    requantize_sum: Callable[..., Quantized]


def quantized_operations(
    call: Callable[..., None],
    serves: Callable[[torch.device], bool],
    types: Mapping[torch.dtype, int],
    *,
    none: int,
    scale_bytes: int,
) -> QuantizedOperations:
    """The four operations. call: ``call(name, device, *arguments)`` runs the compiled function
    `name`.

    serves: whether it works on a device. types: its numbers for dtypes; none: for no values.
    scale_bytes: what the distance of rows of scales is counted in: 4 for bytes, 1 for elements.
    """

    def quantize(
        x: Tensor, *, bits: int, group: int, symmetric: bool, out: Quantized | None = None
    ) -> Quantized:
        references.check_quantize(bits, group)
        if x.dtype not in types or not serves(x.device):
            return references.quantize(x, bits=bits, group=group, symmetric=symmetric, out=out)
        x = x.detach().contiguous()
        room = room_for_quantized(
            x.numel(), x.device, bits=bits, group=group, symmetric=symmetric, out=out
        )
        q, scales, lows = room
        given = (x.numel(), types[x.dtype], x.data_ptr(), group, bits, symmetric)
        call(
            "quantize",
            x.device,
            *given,
            q.data_ptr(),
            scales.data_ptr(),
            0 if lows is None else lows.data_ptr(),
        )
        return room

    def dequantize(
        q: Tensor,
        scales: Tensor,
        lows: Tensor | None,
        *,
        bits: int,
        group: int,
        numel: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        references.check_quantize(bits, group)
        given, alike = quantized_parts(q, scales, lows, bits=bits, group=group, numel=numel)
        alike = alike and all(serves(t.device) and t.device == q.device for t in given)
        if dtype not in types or not alike:
            return references.dequantize(
                q, scales, lows, bits=bits, group=group, numel=numel, dtype=dtype, out=out
            )
        given = [t.detach().contiguous() for t in given]
        out = room_for_values(numel, dtype, q.device, out)
        places = (
            given[0].data_ptr(),
            given[1].data_ptr(),
            0 if lows is None else given[2].data_ptr(),
        )
        call("dequantize", q.device, numel, types[dtype], out.data_ptr(), group, bits, *places)
        return out

    def summed(q: Tensor, scales: Tensor, bits: int, group: int, numel: int) -> bool:
        references.check_quantize(bits, group)
        alike = quantized_rows(q, scales, bits=bits, group=group, numel=numel)
        return alike and serves(q.device) and q.device == scales.device

    def add_rows(
        q: Tensor, scales: Tensor, bits: int, group: int, numel: int, *places: int
    ) -> None:
        # How many rows, where the first ones are, and the distance from one to the next.
        rows = (
            len(q),
            q.data_ptr(),
            q.stride(0),
            scales.data_ptr(),
            scales.stride(0) * scale_bytes,
        )
        call("dequantize_sum", q.device, numel, group, bits, *rows, *places)

    def dequantize_sum(
        q: Tensor,
        scales: Tensor,
        *,
        bits: int,
        group: int,
        numel: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        if not summed(q, scales, bits, group, numel) or dtype not in types:
            return references.dequantize_sum(
                q, scales, bits=bits, group=group, numel=numel, dtype=dtype, out=out
            )
        out = room_for_values(numel, dtype, q.device, out)
        add_rows(q, scales, bits, group, numel, types[dtype], out.data_ptr(), 0)
        return out

    def requantize_sum(
        q: Tensor,
        scales: Tensor,
        *,
        bits: int,
        group: int,
        numel: int,
        out: Quantized | None = None,
    ) -> Quantized:
        if not summed(q, scales, bits, group, numel):
            return references.requantize_sum(
                q, scales, bits=bits, group=group, numel=numel, out=out
            )
        room = room_for_quantized(numel, q.device, bits=bits, group=group, symmetric=True, out=out)
        add_rows(q, scales, bits, group, numel, none, room[0].data_ptr(), room[1].data_ptr())
        return room

    return QuantizedOperations(quantize, dequantize, dequantize_sum, requantize_sum)
