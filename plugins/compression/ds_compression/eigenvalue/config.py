"""The model of the section ``eigenvalue``."""

from __future__ import annotations

from pydantic import model_validator
from typing_extensions import Self

from ds_core.config import Section
from ds_core.config.section import option


class EigenvalueConfig(Section):
    """How much the loss minds the rounding of each block: blocks of large eigenvalues lose their
    bits later.
    """

    enabled: bool = option(False, "Compute eigenvalues, and let weight_quantization follow them.")
    verbose: bool = option(False, "Log each block's eigenvalue.")
    max_iter: int = option(100, "Iterations at most, per block.", ge=1)
    tol: float = option(0.01, "Relative change at which the iteration ends.", ge=0)
    stability: float = option(1e-6, "Added to norms that are divided by.", ge=0)
    gas_boundary_resolution: int = option(
        1, "Every how many optimizer steps they are computed.", ge=1
    )
    layer_name: str = option("bert.encoder.layer", "The module that holds the blocks.")
    layer_num: int = option(0, "How many blocks it has.", ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and self.layer_num < 1:
            raise ValueError("layer_num must be the number of blocks; it is 0")
        return self
