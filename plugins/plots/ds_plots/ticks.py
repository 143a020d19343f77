"""Round numbers for an axis, and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

DECIMAL = (1, 2, 5, 10)
QUARTERS = (1, 2, 2.5, 5, 10)


def round_step(rough: float, factors: Sequence[float] = DECIMAL, tolerance: float = 1.0) -> float:
    """The smallest of `factors` times a power of ten that is at least `rough` times `tolerance`.

    1 where `rough` is not positive.

    tolerance: a little below 1 accepts a round number that `rough` exceeds by an error of rounding
        only.
    """
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(power * factor for factor in factors if power * factor >= rough * tolerance)


def cover(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that cover `low` to `high`.

    The first is at most `low`, the last at least `high`.
    """
    if not high > low:
        # A single value: an axis of a tenth of it to both sides.
        spread = abs(low) * 0.1 or 1.0
        low = low - spread
        high = high + spread
    step = round_step((high - low) / count, QUARTERS, tolerance=0.999)
    # A bound that is a multiple of the step but for an error of rounding gets no tick beyond it.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """The number of a tick, short: 12000 is 12k, 0.00003 is 3e-5.

    step: between ticks; it says how many digits tell them apart.
    """
    # What is left of a sum that should be zero.
    if abs(value) < step * 1e-6:
        return "0"
    size = max(abs(value), step)
    # Where no unit fits, and where decimals would be mostly zeros: powers of ten.
    if size >= 1e15 or size < 1e-3 or (step < 1e-3 and size < 0.01):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        # Four digits are read as they are: 1000 to 9999 get no "k".
        if size >= unit * (10 if sign == "k" else 1) or unit == 1.0:
            digits = max(0, math.ceil(-math.log10(step / unit) - 1e-9)) if step < unit else 0
            # Steps of 2.5 need one digit more than their power of ten.
            digits += 1 if step / unit * 10**digits % 1 > 1e-6 else 0
            text = f"{value / unit:.{digits}f}"
            return text + sign
    return f"{value:g}"
