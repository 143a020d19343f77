"""The section ``reproducibility`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from ds_core.config import Section, option


class Reproducibility(Section):
    """Random numbers by seed, step, sample, module and index: any layout draws those of one process."""

    dropout: bool = option(
        True, "Draw dropout and other random numbers of the model's forward in training so."
    )
    initialization: bool = option(
        False,
        "Draw the parameters again in initialize, module by module with reset_parameters, by their "
        "names.",
    )
    seed: int = option(1234, "Of all numbers.", ge=0, lt=2**63)
    samples: Literal["interleaved", "blocks"] = option(
        "interleaved",
        "How samples are distributed to ranks: one by one, as the engine's own loader does, or one "
        "micro-batch to each rank, in rank order.",
    )
    batch_dim: int = option(
        0, "The dimension of the model's inputs and activations that holds the samples.", ge=0, le=1
    )

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys without effect where dropout is left to torch."""
        if not self.dropout:
            for key in ("samples", "batch_dim"):
                if key in self.model_fields_set:
                    yield key, "has no effect: dropout is false"
