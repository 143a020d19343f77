"""Numbers with units of three digits: ``1234567`` -> ``"1.23 M"`` (torch-free)."""

from __future__ import annotations

from ds_core.errors import UsageError

_SIZES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
_DIGITS = 2


def number_to_string(num: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """`num` in `units` ("T", "G", "M", "K", "", "m", "u"), or in the largest that leaves at least
    1, and a space.
    """
    if units is None:
        fitting = (unit for unit, size in _SIZES.items() if unit != "P" and abs(num) >= size)
        units = next(fitting, "u") if num else ""
    if units not in _SIZES:
        raise UsageError(f"units={units!r}; it is one of {', '.join(map(repr, _SIZES))}")
    return f"{round(num / _SIZES[units], precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Floating-point operations per second: ``"1.5 TFLOPS"``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Multiply-accumulate operations: ``"1.5 GMACs"``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Bytes: ``"1.5 GB"``."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Parameters, with B for 1e9: ``"1.5 B"``."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = _DIGITS) -> str:
    """Seconds: ``"1.5 ms"``."""
    return f"{number_to_string(duration, units, precision)}s"
