"""The section ``zero_optimization``: every documented key with its documented default."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, RootModel, field_validator, model_validator

from ds_core.config import Section, Trait, option
from ds_core.config.section import names_of, old_names
from ds_zero.config_offload import OffloadOptimizer as OffloadOptimizer
from ds_zero.config_offload import OffloadParam as OffloadParam
from ds_zero.config_offload import ZenFlowConfig as ZenFlowConfig

if TYPE_CHECKING:
    from ds_core.config import RunConfig

LEAF_CLASSES = tuple(
    f"transformers.models.{name}"
    for name in (
        "mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
)
"""Module classes of transformers whose submodules run on some ranks only; they are leaf modules by
default.
"""


def _list(value: Any) -> Any:
    """A text as a list, a list of texts without duplicates; anything else is left to later checks."""
    listed = [value] if isinstance(value, str) else value
    if isinstance(listed, list) and all(isinstance(text, str) for text in listed):
        return list(dict.fromkeys(listed))
    return value


class LeafModules(Section):
    """Modules that are gathered as one unit.

    A single name may be given without a list; duplicates are dropped.
    """

    classes: list[str] = option(
        list(LEAF_CLASSES),
        "Class names, plain or dotted; modules of these classes and their subclasses.",
    )
    names: list[str] = option([], "Module names, as named_modules() has them.")
    name_suffixes: list[str] = option([], "Suffixes of module names.")

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: _list(value) for key, value in data.items()}


class Loco(Section):
    """Error feedback of quantised gradients."""

    err_beta: float = option(
        0.8, "The share of the old error that is kept when a new one is made.", ge=0, le=1
    )
    reset_T: int = option(1024, "Optimizer steps after which errors are cleared.", gt=0)


_STAGE_3 = frozenset(
    {
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "leaf_module",
        "allgather_sequential",
        "log_trace_cache_warnings",
        "override_module_apply",
        "gather_16bit_weights_on_model_save",
    }
)
"""Keys of gathering."""

_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Deprecated switches, and the sections that they are read as."""


def _tuned(values: list[Any], *stages: int) -> dict[str, Any]:
    """For ``dscore tune``: values to try, and the stages at which the key has an effect."""
    return {"x-ds-tune": {"values": values, "stages": list(stages)}}


class ZeroConfig(Section):
    """What is sharded over ranks, and how it is communicated. Sizes are numbers of elements."""

    stage: Literal[0, 1, 2, 3] = option(
        0,
        "What is sharded. 0: nothing, 1: optimizer states, 2: and gradients, 3: and parameters.",
        json_schema_extra={"x-ds-tune": [0, 1, 2, 3]},
    )
    # -- gradients
    contiguous_gradients: bool = option(
        True,
        "Copy each gradient into its flat bucket as soon as it is computed; false: when the bucket "
        "is reduced.",
        json_schema_extra=_tuned([True, False], 1, 2),
    )
    reduce_scatter: bool = option(
        True,
        "Reduce-scatter gradients; false: all-reduce them.",
        json_schema_extra=_tuned([True, False], 1, 2),
    )
    reduce_bucket_size: int = option(
        500_000_000,
        "Elements per reduction; a larger parameter has its own.",
        gt=0,
        json_schema_extra=_tuned([50_000_000, 500_000_000, 1_000_000_000], 1, 2, 3),
    )
    use_multi_rank_bucket_allreduce: bool = option(
        True,
        "Without reduce_scatter: one all-reduce per bucket; false: one reduction to each owner.",
    )
    overlap_comm: bool | None = option(
        None,
        "Reduce gradients while backward runs; null: only in stage 3. False: backward waits for "
        "each bucket.",
        json_schema_extra=_tuned([True, False], 1, 2, 3),
    )
    ignore_unused_parameters: bool = option(
        True, "False: a trainable parameter without a gradient is an error."
    )
    round_robin_gradients: bool = option(
        False,
        "Spread the copies of gradients over the ranks.",
        without_effect="each rank copies its own share of every bucket, so copies are always "
        "spread",
    )
    # -- weights after the step
    allgather_partitions: bool = option(
        True,
        "All-gather updated weights; false: each rank broadcasts its own.",
        json_schema_extra=_tuned([True, False], 1, 2),
    )
    allgather_bucket_size: int = option(
        500_000_000,
        "Elements per all-gather; a larger parameter has its own.",
        gt=0,
        old=("allgather_size",),
        json_schema_extra=_tuned([50_000_000, 500_000_000, 1_000_000_000], 1, 2),
    )
    sub_group_size: int = option(
        1_000_000_000,
        "The most elements of this rank's states in one flat buffer; a larger parameter has its "
        "own.",
        gt=0,
    )
    # -- stage 3
    prefetch_bucket_size: int = option(
        50_000_000,
        "Elements gathered ahead of their use.",
        ge=0,
        alias="stage3_prefetch_bucket_size",
        json_schema_extra=_tuned([5_000_000, 50_000_000, 500_000_000], 3),
    )
    param_persistence_threshold: int = option(
        100_000,
        "Parameters with fewer elements stay unsharded.",
        ge=0,
        alias="stage3_param_persistence_threshold",
        json_schema_extra=_tuned([10_000, 100_000, 1_000_000], 3),
    )
    model_persistence_threshold: int = option(
        sys.maxsize,
        "The most elements that stay unsharded.",
        ge=0,
        alias="stage3_model_persistence_threshold",
    )
    max_live_parameters: int = option(
        1_000_000_000,
        "The most gathered elements at a time.",
        ge=0,
        alias="stage3_max_live_parameters",
    )
    max_reuse_distance: int = option(
        1_000_000_000,
        "Keep parameters that are used again within this many elements.",
        ge=0,
        alias="stage3_max_reuse_distance",
    )
    gather_16bit_weights_on_model_save: bool | None = option(
        None,
        "False: save_16bit_model in stage 3 writes nothing and returns False; null: it writes.",
        old=("stage3_gather_fp16_weights_on_model_save",),
        alias="stage3_gather_16bit_weights_on_model_save",
    )
    module_granularity_threshold: int = option(
        0,
        "A module with fewer parameter elements per submodule is gathered as one unit.",
        ge=0,
        alias="stage3_module_granularity_threshold",
    )
    use_all_reduce_for_fetch_params: bool = option(
        False,
        "Gather by all-reduce of zero-padded buffers.",
        alias="stage3_use_all_reduce_for_fetch_params",
    )
    allgather_sequential: bool = option(
        False, "Gather one parameter at a time.", alias="stage3_allgather_sequential"
    )
    memory_efficient_linear: bool = option(
        True,
        "Do not keep gathered weights of linear layers for backward.",
        without_effect="no module keeps a gathered weight for backward",
    )
    log_trace_cache_warnings: bool = option(
        False, "Warn when modules run in another order than in the last pass."
    )
    leaf_module: LeafModules = option(LeafModules(), "Modules that are gathered as one unit.")
    # -- hierarchies of ranks, see ds_zero.comm.hierarchy
    zero_hpz_partition_size: int = option(
        1,
        "hpZ: data-parallel ranks per block that keeps a second copy of gathered weights; 1: off.",
        ge=1,
    )
    mics_shard_size: int = option(
        -1, "MiCS: data-parallel ranks over which states are sharded; -1: all.", ge=-1
    )
    mics_hierarchical_params_gather: bool = option(
        False,
        "MiCS: gather in two steps where a shard group spans several hosts, first across hosts, "
        "then inside.",
    )
    # -- slow links
    zero_quantized_weights: bool = option(
        False, "Stage 3: send weights in 8 bits for modules that run (qwZ)."
    )
    zero_quantized_nontrainable_weights: bool = option(
        False, "Stage 3: weights that no optimizer updates rest in 8 bits, and are sent so."
    )
    zero_quantized_gradients: bool = option(
        False,
        "Stage 3: send gradients in 4 bits, first inside each host and then between hosts (qgZ).",
    )
    zeropp_loco_param: Loco | None = option(
        None, "Error feedback (LoCo) of zero_quantized_gradients; null: none."
    )
    # -- loading and checks
    load_from_fp32_weights: bool = option(
        True,
        "Load master weights from stored fp32 copies; false: make them from the 16-bit weights.",
    )
    enable_sanity_checks: bool = option(False, "Compare the weights of all ranks after every step.")
    # -- offload
    offload_param: OffloadParam | None = option(
        None,
        "Where the parameters of stage 3 are kept.",
        json_schema_extra=_tuned([{"device": "cpu"}], 3),
    )
    offload_optimizer: OffloadOptimizer | None = option(
        None,
        "Where optimizer states are kept.",
        json_schema_extra=_tuned([{"device": "cpu"}], 1, 2, 3),
    )
    cpu_offload: bool | None = option(
        None, "Deprecated: true is read as offload_optimizer.device cpu."
    )
    cpu_offload_param: bool | None = option(
        None, "Deprecated: true is read as offload_param.device cpu."
    )
    cpu_offload_use_pin_memory: bool | None = option(
        None,
        "Deprecated, and not carried over: set pin_memory in offload_optimizer and offload_param.",
    )
    zenflow: ZenFlowConfig | None = option(
        None,
        "Update important columns of weights on the device in every step, others on the host now "
        "and then.",
    )
    # -- later
    save_muon_momentum_buffer_in_memory: bool = option(
        False,
        "Keep Muon's momentum out of NVMe.",
        without_effect="Muon's momentum is stored where offload_optimizer puts the other states",
    )
    pipeline_loading_checkpoint: bool = option(
        False,
        "Load in a pipeline.",
        without_effect="every rank reads only its own ranges of a checkpoint",
    )
    override_module_apply: bool = option(
        True,
        "Module.apply gathers each module's own parameters; false: the function must gather them "
        "itself.",
    )
    legacy_stage1: bool = option(
        False, "The old stage 1.", without_effect="there is one stage 1, with the same results"
    )
    elastic_checkpoint: bool = option(
        False,
        "Legacy elastic checkpoints.",
        without_effect="every checkpoint loads at any number of ranks",
    )

    @model_validator(mode="before")
    @classmethod
    def _old_switch(cls, data: Any) -> Any:
        """true and false are old spellings of stage 1 and 0."""
        return {"stage": int(data)} if isinstance(data, bool) else data

    @model_validator(mode="before")
    @classmethod
    def _old_offload(cls, data: Any) -> Any:
        """Move ``cpu_offload`` and ``cpu_offload_param``; leave what is no boolean to later checks."""
        if not isinstance(data, dict):
            return data
        moved = dict(data)
        for old, new in _OLD_OFFLOAD.items():
            if isinstance(moved.get(old), bool):
                if moved.get(new) is not None and moved[old]:
                    raise ValueError(
                        f"{old} is the old name of {new}, and both are set; remove {old}"
                    )
                if moved.pop(old):
                    moved[new] = {"device": "cpu"}
        return moved

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Old keys, and those without effect at this stage."""
        if isinstance(given, bool):
            yield (
                "",
                f'true and false are deprecated: read as {{"stage": {self.stage}}}; write that',
            )
            return
        for old, new in _OLD_OFFLOAD.items():
            if isinstance(given.get(old), bool):
                device = "cpu" if given[old] else "none"
                yield (
                    old,
                    f'is deprecated and was read as {new} {{"device": "{device}"}}; write that',
                )
        if self.cpu_offload_use_pin_memory is not None:
            yield (
                "cpu_offload_use_pin_memory",
                "has no effect: set pin_memory in offload_optimizer and offload_param",
            )
        names = {
            s: n
            for n, f in type(self).model_fields.items()
            for s in (*names_of(n, f), *old_names(f))
        }
        unused = [k for k in given if names.get(k) in _STAGE_3] if 0 < self.stage < 3 else []
        if self.stage < 3 and self.offload_param is not None and self.offload_param.on:
            unused += [key for key in ("offload_param", "cpu_offload_param") if given.get(key)]
        if unused:
            have = "has" if len(unused) == 1 else "have"
            yield (
                "",
                f"{', '.join(unused)} {have} no effect at stage {self.stage}: only stage 3 gathers "
                "parameters",
            )

    @field_validator("leaf_module", mode="before")
    @classmethod
    def _no_leaves(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("mics_shard_size")
    @classmethod
    def _some_ranks(cls, value: int) -> int:
        if value == 0:
            raise ValueError("a shard group has at least 1 rank; -1 turns MiCS off")
        return value

    def traits(self) -> Iterable[str]:
        """Each stage divides one thing more; LoCo adds the errors of one reduction to the next."""
        divided = (Trait.PARTITIONS_STATES, Trait.PARTITIONS_GRADIENTS, Trait.RELEASES_WEIGHTS)
        loco = () if self.zeropp_loco_param is None else ("feeds_back_errors",)
        return [*divided[: self.stage], *loco]

    @property
    def weights_offload(self) -> OffloadParam | None:
        """`offload_param` where it has an effect: only stage 3 moves weights."""
        return self.offload_param if self.stage == 3 else None

    @property
    def overlap(self) -> bool:
        """`overlap_comm`, where null is replaced by the default of the stage."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    def bucket_elements(self, world: int) -> int:
        """The most elements of one flat buffer over `world` ranks together."""
        return max(
            1, min(self.reduce_bucket_size, self.allgather_bucket_size, self.sub_group_size * world)
        )

    def unit_elements(self, world: int) -> int:
        """The most elements that stage 3 gathers at a time, except for larger parameters."""
        return 1 if self.allgather_sequential else self.bucket_elements(world)


class AllowUntestedOptimizer(RootModel[bool]):
    """Allow optimizers whose class is not declared; default false."""

    model_config = ConfigDict(strict=True, frozen=True)


class ForceOwnOptimizer(RootModel[bool]):
    """Refuse an optimizer object of the user's where states are offloaded; default true."""

    model_config = ConfigDict(strict=True, frozen=True)


def switch(
    config: RunConfig, key: type[AllowUntestedOptimizer | ForceOwnOptimizer], default: bool
) -> bool:
    """The value of a top-level key that is a switch of dscore-zero's."""
    section = config.section(key)
    return default if section is None else section.root
