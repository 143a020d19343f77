"""The section ``compile``, with every documented key (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import model_validator
from typing_extensions import Self

from ds_core.config import Section, Trait, option

_OFFLOAD = (
    "activation_checkpointing.cpu_checkpointing keeps activations in host memory, compiled or not"
)


class CompileConfig(Section):
    """What ``engine.compile()`` compiles, and passes over its graphs."""

    deepcompile: bool = option(False, "Run `passes` over the graphs of engine.compile().")
    passes: tuple[str, ...] | None = option(
        None,
        "Passes by name, in this order: autosp, autotp, z1, z3, or one that a plugin offers. Needs "
        "deepcompile.",
    )
    modules: tuple[str, ...] | None = option(
        None,
        "What is compiled, each as one graph: class names, or names of modules with wildcards. "
        "Default: the model's "
        "repeated block where several ranks share gradients or weights are sharded, else the whole "
        "model.",
        min_length=1,
    )
    at_start: bool = option(
        False,
        "Call engine.compile() when the engine is built, for scripts that do not.",
        json_schema_extra={"x-ds-tune": [True]},
    )
    backend: str = option("inductor", "The backend of torch.compile, for at_start.", min_length=1)
    debug_log: bool = option(False, "Log each graph before and after the passes, on rank 0.")
    # -- debugging of collectives
    sync_before_reduce: bool = option(
        False, "Wait for the device before each reduction of gradients."
    )
    sync_after_reduce: bool = option(
        False, "Wait for each reduction of gradients, and for the device."
    )
    sync_before_allgather: bool = option(
        False, "Wait for the device before each gather of weights."
    )
    sync_after_allgather: bool = option(
        False, "Wait for each gather of weights, and for the device."
    )
    # -- true by design, or the concern of another section
    free_activation: bool = option(
        False,
        "Free big activations early.",
        without_effect="a compiled backward frees each activation after its last use",
    )
    free_activation_threshold: int = option(
        10 * 2**20,
        "The smallest activation that is freed early, in bytes.",
        ge=0,
        without_effect="a compiled backward frees activations of every size after their last use",
    )
    double_buffer: bool = option(
        True,
        "Fill one gradient bucket while another is reduced.",
        without_effect="gradients are always reduced bucket by bucket, in the background",
    )
    keep_int_input_tensors: bool = option(
        True,
        "Keep integer inputs of the first step.",
        without_effect="no pass runs a graph on them",
    )
    keep_all_input_tensors: bool = option(
        False, "Keep all inputs of the first step.", without_effect="no pass runs a graph on them"
    )
    # -- errors
    offload_activation: bool = option(
        False, "Keep activations in host memory.", not_offered=_OFFLOAD
    )
    offload_activation_pin_memory: bool = option(
        True, "In pinned memory.", without_effect="offload_activation is not offered"
    )
    offload_opt_states: bool = option(
        False,
        "Optimizer states in host memory during forward and backward.",
        not_offered="zero_optimization.offload_optimizer keeps them there, compiled or not",
    )
    offload_parameters: bool = option(
        False,
        "Parameters in host memory.",
        not_offered="zero_optimization.offload_param keeps them there, compiled or not",
    )
    symmetric_memory: bool = option(
        False,
        "Gathers by symmetric memory.",
        not_offered="no provider of collectives uses symmetric memory",
    )

    def traits(self) -> Iterable[str]:
        """Each pass by its name; compiled graphs save what they like, and draw by themselves."""
        return [
            Trait.CHANGES_SAVED,
            *(["compiles"] if self.at_start or self.deepcompile else []),
            *(f"{Trait.COMPILE_PASS}{name.lower()}" for name in self.passes or ()),
        ]

    @model_validator(mode="after")
    def _passes_are_switched_on(self) -> Self:
        if self.passes and not self.deepcompile:
            raise ValueError("passes run only with deepcompile: true; set it, or remove passes")
        return self
