"""DeepSpeed's names of weights, and ours: experts of MoE layers and layers of pipelines (standard
library only).

========================================================== ==============================
DeepSpeed's                                                ours
========================================================== ==============================
``moe.deepspeed_moe.gate.wg.weight``                       ``moe.gate.wg.weight``
``moe.deepspeed_moe.experts.deepspeed_experts.3.up.weight`` ``moe.experts.stacked.up.weight``, row 3
``7.weight`` of a pipeline                                 ``layers.7.weight``
``tied_modules.embed.weight`` of a pipeline                ``tied.embed.weight``
========================================================== ==============================
"""

from __future__ import annotations

import re

_EXPERT = re.compile(
    r"(?P<before>(.*\.)?)deepspeed_moe\.experts\.deepspeed_experts\.(?P<row>\d+)\.(?P<rest>.*)"
)
_MOE = re.compile(r"(?P<before>(.*\.)?)deepspeed_moe\.(?P<rest>.*)")
_STACKED = re.compile(r"(?P<before>(.*\.)?)experts\.stacked\.(?P<rest>.*)")
_GATE = re.compile(r"(?P<before>(.*\.)?)gate\.(?P<rest>wg\..*)")


def expert_row(name: str) -> tuple[str, int] | None:
    """(our name, the expert's number) of an expert's weight; None for any other."""
    found = _EXPERT.fullmatch(name)
    return (
        None
        if found is None
        else (f"{found['before']}experts.stacked.{found['rest']}", int(found["row"]))
    )


def our_name(name: str, *, pipeline: bool) -> str:
    """Our name of what is no expert's.

    pipeline: whether names begin with a layer's number.
    """
    if (found := _MOE.fullmatch(name)) is not None:
        name = f"{found['before']}{found['rest']}"
    return pipeline_name(name) if pipeline else name


def pipeline_name(name: str) -> str:
    """Our name of a pipeline's weight."""
    if name.startswith("tied_modules."):
        return "tied." + name.removeprefix("tied_modules.")
    return f"layers.{name}" if name.partition(".")[0].isdigit() else name


def their_expert(name: str) -> tuple[str, str] | None:
    """What comes before and after the expert's number in DeepSpeed's names of stacked experts; None
    for any other.
    """
    found = _STACKED.fullmatch(name)
    return (
        None
        if found is None
        else (f"{found['before']}deepspeed_moe.experts.deepspeed_experts.", f".{found['rest']}")
    )


def their_name(name: str, moe: set[str], *, pipeline: bool) -> str:
    """DeepSpeed's name.

    moe: what the names of MoE layers begin with.
    """
    found = _GATE.fullmatch(name)
    if found is not None and found["before"] in moe:
        name = f"{found['before']}deepspeed_moe.gate.{found['rest']}"
    if pipeline:
        name = re.sub(r"^layers\.(?=\d+\.)", "", name)
        name = re.sub(r"^tied\.", "tied_modules.", name)
    return name
