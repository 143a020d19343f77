"""The section ``optimizer_adapter`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from ds_core.config import Section, option


class OptimizerAdapter(Section):
    """What the arithmetic of an optimizer that nobody declared needs whole."""

    grain: Literal["element", "tensor", "matrix", "model"] = option(
        ...,
        "What the update of an element looks at: element (itself alone), tensor (the parameter that "
        "it is in), matrix (a parameter of two dimensions), or model (all parameters).",
    )
