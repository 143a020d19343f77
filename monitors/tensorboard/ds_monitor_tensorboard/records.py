"""The framing of an event file: each record with its length and the checksums of both (TFRecord).

A record is ``length: uint64, crc(length): uint32, data, crc(data): uint32``, little-endian. The
checksum is CRC-32C (Castagnoli), rotated and offset so that checksums of data that holds checksums
stay strong.

[Note: why not SummaryWriter] Both torch's and tensorboard's own writer hand events to a thread: a
full disk shows as a traceback printed by that thread, and its queue of ten makes training wait.
Importing them costs five times as much as the two message modules that are used here. The framing
is all that is missing, and it is this file.
"""

from __future__ import annotations

import functools
import struct

POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
MASK_OFFSET = 0xA282EAD8
WORD = 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """`data` as one record of an event file."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc32c(length)),
            data,
            struct.pack("<I", masked_crc32c(data)),
        )
    )


def masked_crc32c(data: bytes) -> int:
    """The checksum as event files hold it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK_OFFSET) & WORD


def crc32c(data: bytes) -> int:
    """CRC-32C of `data`."""
    table = _table()
    crc = WORD
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ WORD


@functools.cache
def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
        rows.append(crc)
    return tuple(rows)
