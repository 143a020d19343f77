"""Choosing the optimizer and the learning-rate schedule by name (torch-free until one is built).

Names come from `ds_optimizers` / `ds_schedulers`; any other class of `torch.optim` or
`torch.optim.lr_scheduler` serves under its own name, and any class or function at all under its dotted path, its
arguments checked against its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ds_core.catalogue import install, known, offered_by
from ds_core.config import Section
from ds_core.entries import Grain, OptimizerEntry, SchedulerEntry, resolve
from ds_core.errors import ConfigError, PluginError, Problem, nearest
from ds_core.plugins import blaming

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.config import RunConfig
    from ds_core.plugins import Found, Plugins

__all__ = ["OPTIMIZERS", "SCHEDULERS", "Choice", "choose", "make_adam", "make_adamw", "torch_grain"]

UNUSABLE = {
    "lbfgs": "needs a closure that runs the model again, which the engine's step cannot give",
    "sparseadam": "takes sparse gradients only, and the engine makes them dense",
}
_FLOAT = (float, int)
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_TORCH_GRAINS: Mapping[str, Grain] = {
    **dict.fromkeys(_ELEMENTWISE, "element"),
    **dict.fromkeys(("Adafactor", "Muon"), "matrix"),
}


class AdamParams(Section):
    """``optimizer.params`` of Adam and AdamW (torch's fused implementation; api.md section 16)."""

    lr: float = Field(1e-3, ge=0, description="Learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay rates of the first and second moment.")
    eps: float = Field(1e-8, ge=0, description="Added to the denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; decoupled for AdamW mathematics.")
    amsgrad: bool = Field(False, description="Keep the maximum of the second moment.")
    bias_correction: Literal[True] = Field(True, description="torch's Adam always corrects the bias of the moments.")
    torch_adam: bool = Field(False, description="Insist on torch's Adam even where a faster kernel is installed.")


class AdamModeParams(AdamParams):
    """Adam, whose mathematics are AdamW's unless `adam_w_mode` is false."""

    adam_w_mode: bool = Field(True, description="Decoupled weight decay (AdamW).")


class AdamWParams(AdamParams):
    """AdamW; `adam_w_mode` may only be true."""

    adam_w_mode: Literal[True] = Field(True, description="AdamW is decoupled by definition.")


OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "Adam": OptimizerEntry("ds_core.optim:make_adam", "ds_core.optim:AdamModeParams"),
    "AdamW": OptimizerEntry("ds_core.optim:make_adamw", "ds_core.optim:AdamWParams"),
    "SGD": OptimizerEntry("torch.optim:SGD"),
    "Adagrad": OptimizerEntry("torch.optim:Adagrad"),
}
SCHEDULERS: Mapping[str, SchedulerEntry] = {
    name: SchedulerEntry(f"torch.optim.lr_scheduler:{name}")
    for name in (
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "StepLR",
    )
}


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer or schedule that the config names, validated: call `build` with the groups or the optimizer."""

    name: str
    params: Mapping[str, Any]
    entry: OptimizerEntry | SchedulerEntry
    notes: tuple[Problem, ...] = ()
    """Parameters that were accepted and have no effect."""
    plugin: Found | None = None
    """Who offers it; None for what is torch's or named by its path."""

    def build(self, target: Any) -> Any:
        """Make it. `target`: parameter groups for an optimizer, the optimizer for a schedule."""
        with self.blaming():
            make: Callable[..., Any] = resolve(self.entry.load)
            try:
                return make(target, **self.params)
            except (TypeError, ValueError) as error:
                raise ConfigError([Problem(f"{self.name}.params", str(error))]) from error

    def groups(self, groups: Any, names: Mapping[Any, str]) -> Any:
        """The parameter groups as the optimizer wants them split. names: of the parameters."""
        split = self.entry.groups if isinstance(self.entry, OptimizerEntry) else None
        if split is None:
            return groups
        with self.blaming():
            return resolve(split)(groups, names, **self.params)

    def blaming(self) -> AbstractContextManager[None]:
        """What goes wrong inside is an error of the plugin that offers this; errors of ours are left as they are."""
        if self.plugin is None:
            return nullcontext()
        return blaming(self.plugin, f"failed to make the {self.name} ({self.entry.load})", passing=(ConfigError,))


def choose(
    kind: Literal["optimizer", "scheduler"], config: RunConfig, plugins: Plugins
) -> tuple[Choice | None, list[Problem]]:
    """The choice that section `kind` makes, or the problems with it. None without the section.

    Imports torch only when the name is a torch class whose signature must be read.
    """
    section = getattr(config.core, kind)
    if section is None:
        return None, []
    if kind == "optimizer" and (why := UNUSABLE.get(section.type.lower().removeprefix("torch.optim."))):
        return None, [Problem("optimizer.type", f"{section.type!r} {why}", "use another, such as AdamW")]
    hook = "ds_optimizers" if kind == "optimizer" else "ds_schedulers"
    offers = plugins.named(hook, kind)
    answer = offers.get(section.type.lower())
    if answer is None and "." in section.type:
        return _by_path(kind, section.type, dict(section.params))
    if answer is None:
        entry = _torch_class(kind, section.type)
        if entry is None:
            message, mend = _unknown(kind, section.type, list(offers))
            return None, [Problem(f"{kind}.type", message, mend + plugins.quarantined())]
        return _checked(kind, entry, dict(section.params))
    plugins.join(answer.plugin)
    with blaming(answer.plugin, f"cannot serve {kind} {section.type!r}, which it offers by {hook}"):
        chosen, problems = _checked(kind, answer.value, dict(section.params))
    return (replace(chosen, plugin=answer.plugin) if chosen is not None else None), problems


def _by_path(kind: str, path: str, params: dict[str, Any]) -> tuple[Choice | None, list[Problem]]:
    """The class or function at ``package.module.Name``."""
    module, _, attribute = path.rpartition(".")
    try:
        found = resolve(f"{module}:{attribute}")
    except PluginError as error:
        return None, [Problem(f"{kind}.type", str(error), "write package.module.Class, of something importable")]
    if not callable(found):
        return None, [Problem(f"{kind}.type", f"{path} is a {type(found).__name__}", f"name a class of {kind}s")]
    ref = f"{module}:{attribute}"
    return _checked(kind, OptimizerEntry(ref, grain=None) if kind == "optimizer" else SchedulerEntry(ref), params)


def _unknown(kind: str, name: str, offers: list[str]) -> tuple[str, str]:
    documented = known(f"{kind}s")
    if (dist := offered_by(f"{kind}s", name)) is not None:
        return f"{kind} {name!r} is served by {dist}, which is not installed", f"install it with {install(dist)}"
    if name.lower() in {n.lower() for n in documented}:
        return (
            f"{kind} {name!r} is documented but not built yet",
            f"installed: {', '.join(sorted(offers))}, or any torch.optim class",
        )
    pool = {*offers, *(n.lower() for n in documented)}
    hint = nearest(name, pool)
    where = "torch.optim" if kind == "optimizer" else "torch.optim.lr_scheduler"
    return f"no {kind} is called {name!r}", (
        f"did you mean {hint!r}? " if hint else ""
    ) + f"installed: {', '.join(sorted(offers))}, or any {where} class"


def _torch_class(kind: str, name: str) -> OptimizerEntry | SchedulerEntry | None:
    """Any class of torch, by its exact or case-insensitive name."""
    import torch

    module = torch.optim if kind == "optimizer" else torch.optim.lr_scheduler
    base = torch.optim.Optimizer if kind == "optimizer" else torch.optim.lr_scheduler.LRScheduler
    if name.lower() in {n.lower() for n in known(f"{kind}s")}:
        return None  # the documents give these names their own meaning
    for attribute, value in vars(module).items():
        if (
            attribute.lower() == name.lower()
            and isinstance(value, type)
            and issubclass(value, base)
            and value is not base
        ):
            ref = f"{module.__name__}:{attribute}"
            return OptimizerEntry(ref, grain=torch_grain(value)) if kind == "optimizer" else SchedulerEntry(ref)
    return None


def torch_grain(cls: type) -> Grain:
    """What an optimizer class of torch's needs whole; tensors, which is right for any, when a later torch brings it."""
    return _TORCH_GRAINS.get(cls.__name__, "tensor")


def _checked(
    kind: str, entry: OptimizerEntry | SchedulerEntry, params: dict[str, Any]
) -> tuple[Choice | None, list[Problem]]:
    """The choice of `entry` with its parameters checked, or the problems with them."""
    path = f"{kind}.params"
    if "max_grad_norm" in params:
        why = "clipping is not an optimizer parameter"
        return None, [Problem(f"{path}.max_grad_norm", why, "set the top-level gradient_clipping")]
    if entry.params is None:
        problems = _check_signature(resolve(entry.load), params, path)
        return (None if problems else Choice(kind, params, entry)), problems
    model: type[BaseModel] = resolve(entry.params)
    try:
        checked = model.model_validate(params)
    except ValidationError as error:
        from ds_core.config import translate_errors

        return None, translate_errors(error, model, path, data=params)
    from ds_core.config.notes import notes_on

    return Choice(kind, checked.model_dump(), entry, tuple(notes_on(checked, params, path))), []


def _check_signature(function: Callable[..., Any], params: Mapping[str, Any], path: str) -> list[Problem]:
    accepted = inspect.signature(function).parameters
    names = [
        n
        for n in list(accepted)[1:]
        if accepted[n].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    problems = []
    for key, value in params.items():
        if key not in names and not open_ended:
            hint = nearest(key, names)
            mend = f"did you mean {hint!r}?" if hint else f"it takes {', '.join(names)}"
            problems.append(Problem(f"{path}.{key}", f"{function.__qualname__} has no parameter {key!r}", mend))
        elif (
            key in names
            and isinstance(accepted[key].default, _FLOAT)
            and not isinstance(accepted[key].default, bool)
            and (isinstance(value, (bool, str)) or value is None)
        ):
            problems.append(
                Problem(f"{path}.{key}", f"{value!r} is not a number", f"the default is {accepted[key].default}")
            )
    missing = [n for n in names if accepted[n].default is inspect.Parameter.empty and n not in params]
    problems += [Problem(f"{path}.{n}", f"{function.__qualname__} needs {n!r}", "add it") for n in missing]
    return problems


def make_adam(groups: Any, *, adam_w_mode: bool = True, **params: Any) -> Optimizer:
    """torch's Adam with the documents' default mathematics (AdamW), fused where the device has it."""
    import torch

    return _adam(torch.optim.AdamW if adam_w_mode else torch.optim.Adam, groups, params)


def make_adamw(groups: Any, **params: Any) -> Optimizer:
    """torch's AdamW, fused where the device has it."""
    import torch

    return _adam(torch.optim.AdamW, groups, params)


def _adam(cls: type[Optimizer], groups: Any, params: dict[str, Any]) -> Optimizer:
    for ours in ("adam_w_mode", "torch_adam", "bias_correction"):
        params.pop(ours, None)
    tensors = [p for g in groups for p in g["params"]]
    fused = bool(tensors) and all(p.is_floating_point() and p.device.type in _fused_devices() for p in tensors)
    optimizer: Optimizer = cls(groups, fused=fused, **params)  # type: ignore[call-arg]
    return optimizer


def _fused_devices() -> list[str]:
    """Device types on which torch's fused optimizers run."""
    try:
        from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

        return list(_get_fused_kernels_supported_devices())
    except ImportError:
        return ["cpu", "cuda"]
