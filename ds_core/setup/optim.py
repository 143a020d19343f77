"""Choosing the optimizer and the learning-rate schedule by name (torch-free until one is built).

Names come from `ds_optimizers` / `ds_schedulers`; any other class of `torch.optim` or
`torch.optim.lr_scheduler` serves under its own name, and any class or function under its dotted
path, its arguments checked against its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ds_core.config import RunConfig, Section
from ds_core.entries import Grain, OptimizerEntry, SchedulerEntry, resolve
from ds_core.errors import ConfigError, PluginError, Problem, did_you_mean
from ds_core.plugins.checks import blaming

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.plugins import Found, Plugins

Kind = Literal["optimizer", "scheduler"]

UNUSABLE = {
    "lbfgs": "needs a closure that runs the model again, which the engine's step cannot give",
    "sparseadam": "takes sparse gradients only, and the engine makes them dense",
}
_ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_TORCH_GRAINS: Mapping[str, Grain] = {
    **dict.fromkeys(_ELEMENTWISE, "element"),
    **dict.fromkeys(("Adafactor", "Muon"), "matrix"),
}


class AdamParams(Section):
    """``optimizer.params`` of Adam (torch's fused implementation), whose mathematics are AdamW's by
    default.
    """

    lr: float = Field(1e-3, ge=0, description="Learning rate.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay rates of the first and second moment."
    )
    eps: float = Field(1e-8, ge=0, description="Added to the denominator.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay; decoupled for AdamW mathematics."
    )
    amsgrad: bool = Field(False, description="Keep the maximum of the second moment.")
    bias_correction: Literal[True] = Field(
        True, description="torch's Adam always corrects the bias of the moments."
    )
    torch_adam: bool = Field(
        False, description="Insist on torch's Adam even where a faster kernel is installed."
    )
    adam_w_mode: bool = Field(True, description="Decoupled weight decay (AdamW).")


class AdamWParams(AdamParams):
    """``optimizer.params`` of AdamW."""

    adam_w_mode: Literal[True] = Field(True, description="AdamW is decoupled by definition.")


OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "Adam": OptimizerEntry("ds_core.setup.optim:make_adam", "ds_core.setup.optim:AdamParams"),
    "AdamW": OptimizerEntry("ds_core.setup.optim:make_adam", "ds_core.setup.optim:AdamWParams"),
    "SGD": OptimizerEntry("torch.optim:SGD"),
    "Adagrad": OptimizerEntry("torch.optim:Adagrad"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer or schedule that the config names, validated: call `build` with the groups or
    the optimizer.

    notes: parameters that are accepted and have no effect.
    plugin: who offers it, and as what (`offered`); None for what is torch's or named by its path.
    """

    name: str
    params: Mapping[str, Any]
    entry: OptimizerEntry | SchedulerEntry
    notes: tuple[Problem, ...] = ()
    plugin: Found | None = None
    offered: str = ""

    def build(self, target: Any) -> Any:
        """Make it. `target`: parameter groups for an optimizer, the optimizer for a schedule."""
        with self.blaming():
            make: Callable[..., Any] = resolve(self.entry.load)
            try:
                made = make(target, **self.params)
            except (TypeError, ValueError) as error:
                raise ConfigError([Problem(f"{self.name}.params", str(error))]) from error
            if made is None:  # what else is no optimizer or schedule fails where it is used
                raise PluginError(
                    f"{self.entry.load} of {self.name}.type {self.offered!r} gave None"
                )
            return made

    def groups(self, groups: Any, names: Mapping[Any, str]) -> Any:
        """The parameter groups as the optimizer wants them split.

        names: of the parameters.
        """
        split = self.entry.groups if isinstance(self.entry, OptimizerEntry) else None
        if split is None:
            return groups
        with self.blaming():
            return resolve(split)(groups, names, **self.params)

    def blaming(self) -> AbstractContextManager[None]:
        """Errors inside name the plugin that offers this; ConfigErrors pass as they are."""
        if self.plugin is None:
            return nullcontext()
        return blaming(
            self.plugin,
            f"failed to make the {self.name} ({self.entry.load})",
            passing=(ConfigError,),
        )


def choose(kind: Kind, config: RunConfig, plugins: Plugins) -> tuple[Choice | None, list[Problem]]:
    """The choice that section `kind` makes, or the problems with it. None without the section.

    Imports torch only when the name is a torch class whose signature must be read.
    """
    section = getattr(config.core, kind)
    if section is None:
        return None, []
    name = section.type
    params = dict(section.params)
    if kind == "optimizer" and (why := UNUSABLE.get(name.lower().removeprefix("torch.optim."))):
        return None, [Problem("optimizer.type", f"{name!r} {why}", "use another, such as AdamW")]
    hook = f"ds_{kind}s"
    offers = plugins.named(hook, kind)
    if (answer := offers.get(name.lower())) is not None:
        plugins.join(answer.plugin)
        with blaming(answer.plugin, f"cannot serve {kind} {name!r}, which it offers by {hook}"):
            chosen, problems = _checked(kind, answer.value, params)
        return (
            replace(chosen, plugin=answer.plugin, offered=name) if chosen is not None else None
        ), problems
    # No plugin offers it: a dotted path, or the name of a class of torch.
    ref = ":".join(name.rsplit(".", 1)) if "." in name else _torch_class(kind, name)
    if ref is not None:
        return _by_reference(kind, ref, params)
    from ds_core.catalogue import missing

    module = "torch.optim" if kind == "optimizer" else "torch.optim.lr_scheduler"
    instead = f"installed: {', '.join(sorted(offers))}, or any {module} class"
    return None, [
        missing(
            f"{kind}s",
            name,
            offers,
            path=f"{kind}.type",
            instead=instead,
            more=plugins.quarantined(),
        )
    ]


def _by_reference(
    kind: Kind, ref: str, params: dict[str, Any]
) -> tuple[Choice | None, list[Problem]]:
    """The class or function that `ref` names, with its parameters checked."""
    try:
        found = resolve(ref)
    except PluginError as error:
        return None, [
            Problem(
                f"{kind}.type", str(error), "write package.module.Class, of something importable"
            )
        ]
    if not callable(found):
        message = f"{ref.replace(':', '.')} is a {type(found).__name__}"
        return None, [Problem(f"{kind}.type", message, f"name a class of {kind}s")]
    if kind == "scheduler":
        return _checked(kind, SchedulerEntry(ref), params)
    return _checked(kind, OptimizerEntry(ref, grain=torch_grain(found)), params)


def _torch_class(kind: Kind, name: str) -> str | None:
    """The reference of a class of torch by its name, in any case; None for names that DeepSpeed's
    documentation defines.
    """
    import torch

    from ds_core.catalogue import known

    if name.lower() in {n.lower() for n in known(f"{kind}s")}:
        return None
    module = torch.optim if kind == "optimizer" else torch.optim.lr_scheduler
    base = torch.optim.Optimizer if kind == "optimizer" else torch.optim.lr_scheduler.LRScheduler
    classes = {
        n.lower(): n for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, base)
    }
    found = classes.get(name.lower())
    return None if found is None or found == base.__name__ else f"{module.__name__}:{found}"


def torch_grain(cls: Any) -> Grain | None:
    """The grain of an optimizer class of torch's own, None for anything else.

    It is "tensor", which is right for any, for a class that a later torch brings.
    """
    import torch

    name = getattr(cls, "__name__", "")
    return _TORCH_GRAINS.get(name, "tensor") if getattr(torch.optim, name, None) is cls else None


def _checked(
    kind: Kind, entry: OptimizerEntry | SchedulerEntry, params: dict[str, Any]
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
        from ds_core.config.translate import translate_errors

        return None, translate_errors(error, model, path, data=params)
    from ds_core.config.build import notes_on

    return Choice(kind, checked.model_dump(), entry, tuple(notes_on(checked, params, path))), []


def _check_signature(
    function: Callable[..., Any], params: Mapping[str, Any], path: str
) -> list[Problem]:
    """Keys that `function` does not take or lacks, and values that are no numbers where its default
    is one.
    """
    arguments = list(inspect.signature(function).parameters.values())[1:]
    accepted = {
        a.name: a.default for a in arguments if a.kind in (a.KEYWORD_ONLY, a.POSITIONAL_OR_KEYWORD)
    }
    open_ended = any(a.kind is a.VAR_KEYWORD for a in arguments)
    name = function.__qualname__
    problems = []
    for key, value in params.items():
        default = accepted.get(key)
        if key not in accepted and not open_ended:
            remedy = did_you_mean(key, accepted, f"it takes {', '.join(accepted)}")
            problems.append(Problem(f"{path}.{key}", f"{name} has no parameter {key!r}", remedy))
        elif type(default) in (int, float) and (value is None or isinstance(value, (bool, str))):
            problems.append(
                Problem(f"{path}.{key}", f"{value!r} is not a number", f"the default is {default}")
            )
    missing = [n for n, d in accepted.items() if d is inspect.Parameter.empty and n not in params]
    return problems + [Problem(f"{path}.{n}", f"{name} needs {n!r}", "add it") for n in missing]


def make_adam(groups: Any, *, adam_w_mode: bool = True, **params: Any) -> Optimizer:
    """torch's Adam with the documents' default mathematics (AdamW), fused where the device has
    it."""
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    # Keys of the documents for which torch has no argument.
    for ours in ("torch_adam", "bias_correction"):
        params.pop(ours, None)
    tensors = [p for g in groups for p in g["params"]]
    # torch raises for tensors that its fused kernels do not serve, instead of going without.
    devices = _get_fused_kernels_supported_devices()
    fused = bool(tensors) and all(
        p.is_floating_point() and p.device.type in devices for p in tensors
    )
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups, fused=fused, **params)
