"""The operations of quantisation over compiled code: checks, room for what comes out, addresses and
sizes.

What compiled code does not take goes to the reference, which means the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Compiled:
    """The operations over compiled code; see `quantized_operations`."""

    call: Callable[..., None]
    serves: Callable[[torch.device], bool]
    types: Mapping[torch.dtype, int]
    none: int
    scale_bytes: int

    def quantize(
        self, x: Tensor, *, bits: int, group: int, symmetric: bool, out: Quantized | None = None
    ) -> Quantized:
        """See `references.quantize`."""
        references.check_quantize(bits, group)
        if x.dtype not in self.types or not self.serves(x.device):
            return references.quantize(x, bits=bits, group=group, symmetric=symmetric, out=out)
        x = x.detach().contiguous()
        room = room_for_quantized(
            x.numel(), x.device, bits=bits, group=group, symmetric=symmetric, out=out
        )
        q, scales, lows = room
        given = (x.numel(), self.types[x.dtype], x.data_ptr(), group, bits, symmetric)
        self.call(
            "quantize",
            x.device,
            *given,
            q.data_ptr(),
            scales.data_ptr(),
            0 if lows is None else lows.data_ptr(),
        )
        return room

    def dequantize(
        self,
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
        """See `references.dequantize`."""
        references.check_quantize(bits, group)
        given, alike = quantized_parts(q, scales, lows, bits=bits, group=group, numel=numel)
        alike = alike and all(self.serves(t.device) and t.device == q.device for t in given)
        if dtype not in self.types or not alike:
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
        self.call(
            "dequantize", q.device, numel, self.types[dtype], out.data_ptr(), group, bits, *places
        )
        return out

    def _check(self, q: Tensor, scales: Tensor, bits: int, group: int, numel: int) -> bool:
        """Whether compiled code can add these rows up; KernelError where their sizes are wrong."""
        references.check_quantize(bits, group)
        alike = quantized_rows(q, scales, bits=bits, group=group, numel=numel)
        return alike and self.serves(q.device) and q.device == scales.device

    def _add_rows(
        self, q: Tensor, scales: Tensor, bits: int, group: int, numel: int, *places: int
    ) -> None:
        # How many rows, where the first ones are, and the distance from one to the next.
        rows = (
            len(q),
            q.data_ptr(),
            q.stride(0),
            scales.data_ptr(),
            scales.stride(0) * self.scale_bytes,
        )
        self.call("dequantize_sum", q.device, numel, group, bits, *rows, *places)

    def dequantize_sum(
        self,
        q: Tensor,
        scales: Tensor,
        *,
        bits: int,
        group: int,
        numel: int,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `references.dequantize_sum`."""
        if not self._check(q, scales, bits, group, numel) or dtype not in self.types:
            return references.dequantize_sum(
                q, scales, bits=bits, group=group, numel=numel, dtype=dtype, out=out
            )
        out = room_for_values(numel, dtype, q.device, out)
        self._add_rows(q, scales, bits, group, numel, self.types[dtype], out.data_ptr(), 0)
        return out

    def requantize_sum(
        self,
        q: Tensor,
        scales: Tensor,
        *,
        bits: int,
        group: int,
        numel: int,
        out: Quantized | None = None,
    ) -> Quantized:
        """See `references.requantize_sum`."""
        if not self._check(q, scales, bits, group, numel):
            return references.requantize_sum(
                q, scales, bits=bits, group=group, numel=numel, out=out
            )
        room = room_for_quantized(numel, q.device, bits=bits, group=group, symmetric=True, out=out)
        self._add_rows(
            q, scales, bits, group, numel, self.none, room[0].data_ptr(), room[1].data_ptr()
        )
        return room


def quantized_operations(
    call: Callable[..., None],
    serves: Callable[[torch.device], bool],
    types: Mapping[torch.dtype, int],
    *,
    none: int,
    scale_bytes: int,
) -> QuantizedOperations:
    """The four operations.

    call: ``call(name, device, *arguments)`` runs the compiled function `name`.
    serves: whether it works on a device.
    types: its numbers for dtypes.
    none: its number for no values.
    scale_bytes: what the distance of rows of scales is counted in: 4 for bytes, 1 for elements.
    """
    by = _Compiled(call, serves, types, none, scale_bytes)
    return QuantizedOperations(by.quantize, by.dequantize, by.dequantize_sum, by.requantize_sum)
