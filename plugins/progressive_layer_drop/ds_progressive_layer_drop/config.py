"""The section ``progressive_layer_drop``, with every documented key (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from ds_core.config import Section, option


class ProgressiveLayerDropConfig(Section):
    """Skip layers in training, ever more of them: theta(t) = (1 - theta) exp(-gamma t) + theta
    after t steps.
    """

    enabled: bool = option(False, "Skip layers in training.")
    theta: float = option(
        1.0,
        "What the last layer's probability to run falls to; 1 skips nothing, 0.5 a quarter of all.",
        gt=0,
        le=1,
    )
    gamma: float = option(0.001, "How fast it falls, per optimizer step.", ge=0)
    apply_to: Literal["auto", "forward", "layers"] = option(
        "auto",
        "forward: the model's forward is given progressive_layer_drop and pld_theta, and skips by "
        "itself; layers: its "
        "layers are skipped from outside; auto: forward where its signature has pld_theta, else "
        "layers.",
    )
    layers: tuple[str, ...] | None = option(
        None,
        "The layers, first to last: class names, or names of modules with wildcards. Default: the "
        "repeated blocks.",
        min_length=1,
    )
    rescale: bool = option(
        True, "Divide what a layer adds by its probability to run, as the expected output needs."
    )
    seed: int = option(1234, "Which layers a step skips, the same on every rank.")

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Numbers that skip nothing, and keys of the other way."""
        if self.enabled and (self.theta == 1 or self.gamma == 0):
            yield "enabled", "has no effect: no layer is skipped with theta 1 or gamma 0"
        if self.enabled and self.apply_to == "forward":
            for key in ("layers", "rescale", "seed"):
                if key in self.model_fields_set:
                    yield key, 'has no effect: with apply_to "forward" the model skips by itself'
