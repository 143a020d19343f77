"""Rules between core keys, checked on the raw data so that they are found together with every other problem."""

from __future__ import annotations

from typing import Any

from ds_core.errors import Problem

__all__ = ["cross_problems"]

_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def cross_problems(raw: dict[str, Any]) -> list[Problem]:
    """The problems between sections of the core; values of a wrong type are left to their own errors."""
    bf16 = "bf16" if "bf16" in raw or "bfloat16" not in raw else "bfloat16"
    on = [name for name in ("fp16", bf16, "amp") if _get(raw, name, "enabled") is True]
    problems = []
    if len(on) > 1:
        why = f"{' and '.join(on)} are switched on together, and exclude each other"
        problems.append(Problem(f"{on[1]}.enabled", why, f"keep one of {', '.join(on)}"))
    problems += _param_dtype(raw, on[0] if on else None)
    if raw.get("prescale_gradients") is True and raw.get("gradient_predivide_factor", 1) != 1:
        why = "has no effect when prescale_gradients divides by all ranks beforehand"
        problems.append(Problem("gradient_predivide_factor", why, "leave one of the two out"))
    if isinstance(raw.get("fp16"), dict) and raw["fp16"].get("clip") is not None and "gradient_clipping" in raw:
        problems.append(
            Problem(
                "fp16.clip", "is the old name of gradient_clipping, and both are set", "keep gradient_clipping only"
            )
        )
    return problems


def _param_dtype(raw: dict[str, Any], mode: str | None) -> list[Problem]:
    given = _get(raw, "data_types", "param_dtype")
    if not isinstance(given, str):
        return []
    given = given.removeprefix("torch.")
    name = _NAMES.get(given, given)
    wanted = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", None: "fp32"}.get(mode)
    if wanted is None or name == wanted or name not in _NAMES.values():
        return []
    mode_text = f"{mode} is switched on" if mode else "neither fp16 nor bf16 is switched on"
    mend = f"set it to {wanted!r} or leave it out" + (
        "" if name == "fp32" else f', or set "{name}": {{"enabled": true}}'
    )
    return [Problem("data_types.param_dtype", f"{given!r} does not match the mode of the run: {mode_text}", mend)]


def _get(raw: dict[str, Any], section: str, key: str) -> Any:
    inner = raw.get(section)
    return inner.get(key) if isinstance(inner, dict) else None
