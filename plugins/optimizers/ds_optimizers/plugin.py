"""What this distribution offers to ds_core: optimizers by name (torch-free).

An optimizer's module is imported when it is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import OptimizerEntry
from ds_core.errors import Problem

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.plugins import Plugins


def _entry(load: str, params: str, **declared: object) -> OptimizerEntry:
    where = f"ds_optimizers.config:{params}Params"
    return OptimizerEntry(f"ds_optimizers.{load}", where, **declared)  # type: ignore[arg-type]


def _matrices(load: str, params: str) -> OptimizerEntry:
    return _entry(
        f"matrices.{load}",
        params,
        grain="matrix",
        groups="ds_optimizer_kit.matrix_optimizer:split",
        collects=True,
    )


SELF_REDUCED = "ds_optimizers.onebit.partitioner:OptimizerReduced"

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "Adam": _entry("adam:make_adam", "Adam"),
    "AdamW": _entry("adam:make_adamw", "AdamW"),
    "FusedAdam": _entry("adam:FusedAdam", "FusedAdam"),
    "CPUAdam": _entry("adam:CPUAdam", "CPUAdam"),
    "DeepSpeedCPUAdam": _entry("adam:DeepSpeedCPUAdam", "DeepSpeedCPUAdam"),
    # They collect nothing, but ask where a tensor begins in its parameter.
    "Adam8bit": _entry("eight_bit.adam:Adam8bit", "Adam8bit", collects=True),
    "AdamW8bit": _entry("eight_bit.adam:AdamW8bit", "AdamW8bit", collects=True),
    "Adagrad": _entry("adagrad:Adagrad", "Adagrad"),
    "CPUAdagrad": _entry("adagrad:CPUAdagrad", "CPUAdagrad"),
    "DeepSpeedCPUAdagrad": _entry("adagrad:DeepSpeedCPUAdagrad", "DeepSpeedCPUAdagrad"),
    "Lion": _entry("lion:Lion", "Lion"),
    "FusedLion": _entry("lion:FusedLion", "Lion"),
    "CPULion": _entry("lion:CPULion", "Lion"),
    "DeepSpeedCPULion": _entry("lion:DeepSpeedCPULion", "CPULion"),
    "AdamMini": _entry(
        "moments.adam_mini:AdamMini",
        "AdamMini",
        grain="tensor",
        groups="ds_optimizers.moments.adam_mini:mini_groups",
        collects=True,
    ),
    # It collects nothing, but must not be given states of zero: see its `bind_layout`.
    "ScheduleFreeAdamW": _entry(
        "moments.schedule_free:ScheduleFreeAdamW", "ScheduleFreeAdamW", collects=True
    ),
    "Lamb": _entry("lamb:Lamb", "Lamb", grain="tensor", collects=True),
    "FusedLamb": _entry("lamb:FusedLamb", "Lamb", grain="tensor", collects=True),
    "Muon": _entry(
        "muon:Muon",
        "Muon",
        grain="matrix",
        groups="ds_optimizers.muon:muon_groups",
        collects=True,
    ),
    "SOAP": _matrices("soap:SOAP", "SOAP"),
    "Shampoo": _matrices("shampoo:Shampoo", "Shampoo"),
    "Dion": _matrices("dion:Dion", "Dion"),
    "GaLore": _matrices("galore:GaLore", "GaLore"),
    "SGD": _entry("sgd:SGD", "SGD"),
    "MuAdam": _entry("mup:MuAdam", "MuAdam", groups="ds_optimizers.mup:adam_groups"),
    "MuAdamW": _entry("mup:MuAdamW", "MuAdam", groups="ds_optimizers.mup:adam_groups"),
    "MuSGD": _entry("mup:MuSGD", "SGD", groups="ds_optimizers.mup:sgd_groups"),
    "OneBitAdam": _entry("onebit.adam:OneBitAdam", "OneBitAdam", partitioner=SELF_REDUCED),
    "ZeroOneAdam": _entry("onebit.zero_one:ZeroOneAdam", "ZeroOneAdam", partitioner=SELF_REDUCED),
    "OneBitLamb": _entry(
        "onebit.lamb:OneBitLamb",
        "OneBitLamb",
        grain="model",
        partitioner=SELF_REDUCED,
        collects=True,
    ),
}
LAMB_FORMS = ("lamb", "fusedlamb", "onebitlamb")
MU_FORMS = ("muadam", "muadamw", "musgd")
ONE_RATE = ("lrrangetest", "onecycle", "warmuplr", "warmupdecaylr")
"""Schedules that say what the learning rate is, of all groups alike unless they are given lists."""


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """The optimizers that ``optimizer.type`` may name, with the models of their
    ``optimizer.params``.
    """
    return OPTIMIZERS


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """What does not go with LAMB and with the optimizers of maximal update parametrisation."""
    section = config.core.optimizer
    name = section.type.lower() if section is not None else ""
    answer = plugins.named("ds_optimizers", "optimizer").get(name)
    if answer is None or answer.value not in OPTIMIZERS.values():
        # An optimizer of another distribution.
        return ()
    problems = (
        _loss_scale(config) if name in LAMB_FORMS else _one_rate(config) if name in MU_FORMS else []
    )
    return [*problems, *_narrow_states(config, name)]


def _narrow_states(config: RunConfig, name: str) -> list[Problem]:
    """States in bf16 of an optimizer that keeps them in fp32."""
    from ds_optimizers import config as models

    if not (config.core.bf16.enabled and config.core.bf16.bf16_optimizer_states):
        return []
    entry = next(entry for known, entry in OPTIMIZERS.items() if known.lower() == name)
    if (
        "fp32_optimizer_states"
        in getattr(models, str(entry.params).rpartition(":")[2]).model_fields
    ):
        return []
    why = f"{name!r} keeps its states in fp32"
    return [
        Problem(
            "bf16.bf16_optimizer_states", why, "use Adam, Adagrad or Lion, or leave the key out"
        )
    ]


def _one_rate(config: RunConfig) -> list[Problem]:
    """A schedule that sets the same learning rate for groups that need different ones."""
    scheduler = config.core.scheduler
    if scheduler is None or scheduler.type.lower() not in ONE_RATE:
        return []
    if any(isinstance(value, list) for value in scheduler.params.values()):
        # A list has a rate for each group.
        return []
    why = (
        f"{scheduler.type!r} sets one learning rate for all groups, and optimizers of mup need "
        "one for each width"
    )
    return [
        Problem(
            "scheduler.type",
            why,
            "use WarmupCosineLR or torch's LambdaLR, which multiply each group's own",
        )
    ]


def _loss_scale(config: RunConfig) -> list[Problem]:
    """LAMB adapts to the size of its updates, which a loss scale that never gives way can make
    infinite.
    """
    fp16 = config.core.fp16
    if not fp16.enabled or not fp16.loss_scale:
        return []
    return [
        Problem(
            "fp16.loss_scale",
            f"is {fp16.loss_scale:g}, but LAMB-type optimizers need a dynamic loss scale",
            "set it to 0, or use bf16",
        )
    ]


def ds_open(ctx: Context) -> None:
    """Set the dtype of states, and say where tensors lie: the optimizer exists by now, and its
    states do not.
    """
    from ds_optimizer_kit import bind

    from ds_optimizers.unfrozen import note

    note(ctx)
    bind(ctx)
    if ctx.config.core.bf16.enabled and ctx.config.core.bf16.bf16_optimizer_states:
        from ds_optimizers.base import KernelOptimizer

        if isinstance(ctx.engine.optimizer, KernelOptimizer):
            ctx.engine.optimizer.narrow_states()


def ds_step_begin(ctx: Context, step: int) -> None:
    """Tell of parameters that were unfrozen and that the optimizer does not have."""
    from ds_optimizers.unfrozen import EVERY, look

    if step % EVERY == 0:
        look(ctx)
