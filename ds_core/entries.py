"""What a declaration module hands to the core: small records with lazy references (torch-free).

A reference is a string ``"package.module:attribute"``; it is imported only when the core has chosen
it, so a hundred installed plugins cost nothing until one is used. A record checks its fields when
it is made; what a hook returns is checked by what `ds_core.plugins.checks.gives` declares at its
specification.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ds_core.errors import DSError, PluginError
from ds_core.moved import names_of

if TYPE_CHECKING:
    from torch import nn

__getattr__ = names_of(__name__)

Ref = str
"""``"package.module:attribute"``."""

Probe = Ref | Callable[[], "str | None"]
"""Answers None when the thing can be used here, else the reason why not.

Must be cheap and change nothing.
"""

Grain = Literal["element", "tensor", "matrix", "model"]


def resolve(ref: Ref) -> Any:
    """Import what `ref` names.

    Raises PluginError with the reference and the cause when the module cannot be imported or has no
    such attribute.
    """
    module_name, _, attribute = ref.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (DSError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module may even call sys.exit
        raise PluginError(f"cannot load {ref!r}: {type(error).__name__}: {error}") from error
    return found


def ask(probe: Probe | None) -> str | None:
    """Run a probe; an exception counts as a reason: no probe may take the process down."""
    if probe is None:
        return None
    try:
        answer: Any = (resolve(probe) if isinstance(probe, str) else probe)()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any failure of a probe is an answer
        return f"{type(error).__name__}: {error}"
    if answer is None or isinstance(answer, str):
        return answer
    return f"its probe answered {answer!r}, which is neither None nor a reason"


def is_reference(value: Any) -> bool:
    """Whether `value` is a `Ref`."""
    return isinstance(value, str) and re.fullmatch(r"[\w.]+:[\w.]+", value) is not None


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "Ref": (is_reference, "a reference 'package.module:attribute'"),
    "Probe": (
        lambda v: is_reference(v) or callable(v),
        "a reference 'package.module:attribute', a function",
    ),
    "Grain": (lambda v: v in get_args(Grain), "'element', 'tensor', 'matrix', 'model'"),
    "Phase": (lambda v: isinstance(v, Phase), "a ds_core.entries.Phase"),
    "Callable[[nn.Module], nn.Module]": (callable, "a function of a module"),
    "tuple[str, ...]": (
        lambda v: isinstance(v, (tuple, list)) and all(isinstance(text, str) for text in v),
        "a tuple of strings",
    ),
    "str": (lambda v: isinstance(v, str), "a string"),
    "int": (lambda v: isinstance(v, int) and not isinstance(v, bool), "an integer"),
    "bool": (lambda v: type(v) is bool, "True or False"),
}
"""By a field's annotation, without ``| None``: what its value must be, and how to say so."""


class _Record:
    """Checks its fields when it is made, so that the traceback ends in the plugin's faulty line."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            (kind, or_none, _) = str(field.type).partition(" | None")
            # a subclass may have fields of its own
            if kind not in _RULES or (or_none and value is None):
                continue
            fits, wanted = _RULES[kind]
            if not fits(value):
                none = " or None" if or_none else ""
                raise ValueError(
                    f"{type(self).__name__}.{field.name} is {value!r}; it must be {wanted}{none}"
                )
            if not (value or or_none) and kind == "str" and field.default is MISSING:
                raise ValueError(f"{type(self).__name__}.{field.name} is empty")


@dataclass(frozen=True, slots=True)
class AcceleratorEntry(_Record):
    """A device kind.

    `load` gives a class or function without arguments that returns an `Accelerator`.
    """

    name: str
    device_type: str
    load: Ref
    probe: Probe | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class KernelEntry(_Record):
    """One provider of one named operation; the highest available `priority` serves.

    devices, dtypes: torch names without the ``torch.`` (``"cpu"``, ``"float32"``); empty means any.
        By convention cuda 30, triton 20, cpp 10, reference 0.
    build: reference to the `ds_kernel_kit.build.Extension` that is compiled on first use, for
        ``dscore ops build``.
    check: for an operation of the plugin's own, reference to a function like those in
        `ds_kernel_kit.comparisons.CHECKS`, for ``dscore ops test`` and `KernelConformance`.
    """

    op: str
    provider: str
    load: Ref
    priority: int
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    available: Probe | None = None
    build: Ref | None = None
    check: Ref | None = None


@dataclass(frozen=True, slots=True)
class CollectivesEntry(_Record):
    """A provider of collectives; the available one of the highest priority serves.

    device, backend: it serves tensors on this device, in groups of this backend.
    load: called as ``load(group, messages)`` on each rank of a group, when it is first used; gives
        a `ds_core.comm.GroupCollectives`. Where it takes an argument ``config``, it is given the
        `RunConfig` too, of the first run that uses the group.
    build: as `KernelEntry.build`.
    """

    load: Ref
    device: str
    backend: str
    priority: int = 0
    available: Probe | None = None
    build: Ref | None = None


@dataclass(frozen=True, slots=True)
class OptimizerEntry(_Record):
    """A named optimizer. `load` is called as ``load(param_groups, **params)``."""

    load: Ref
    params: Ref | None = None
    """Reference to a pydantic model of the keyword arguments, which is validated before anything
    starts."""
    grain: Grain | None = "element"
    """What its arithmetic needs whole: single elements, tensors (norms), matrices, or the model
    (values over all tensors); None when unknown. Where ranks have parts of what it needs whole,
    `initialize` refuses."""
    groups: Ref | None = None
    """For one that treats parameters differently by name or shape: called before anything is sharded,
    as ``groups(param_groups, names, **params)`` with the names of parameters, and
    gives the groups to use."""
    partitioner: Ref | None = None
    """For one that reduces gradients by itself: reference to a function ``ctx -> Partitioner`` that
    leaves them to it, and is given the optimizer by `Partitioner.bind`. None: any partitioner will
    do."""
    collects: bool = False
    """It collects from other ranks what it needs whole, as by dscore-optimizer-kit, so that its tensors
    may be cut anywhere."""


@dataclass(frozen=True, slots=True)
class SchedulerEntry(_Record):
    """A named learning-rate schedule. `load` is called as ``load(optimizer, **params)``."""

    load: Ref
    params: Ref | None = None


@dataclass(frozen=True, slots=True)
class StateStoreEntry(_Record):
    """Where model states can rest.

    `load` is called as ``load(ctx, options)`` and gives a `ds_state_stores.StateStore`.

    options: the keys next to ``device`` where the config chose it.
    """

    load: Ref


@dataclass(frozen=True, slots=True)
class LauncherEntry(_Record):
    """A way to start processes for ``dscore run --launcher NAME``.

    load: gives ``(LaunchRequest) -> exit code``.
    """

    load: Ref
    help: str = ""


@dataclass(frozen=True, slots=True)
class Chart(_Record):
    """Something that ``dscore plan`` shows of a config.

    name: of its file; svg: a drawing that stands on its own.
    """

    name: str
    title: str
    text: str
    svg: str | None = None


@dataclass(frozen=True, slots=True)
class Request(_Record):
    """What a plugin asks all ranks to do after a step (`ds_request`).

    stop: end training, ``engine.should_stop`` is true from now on.
    save: save a checkpoint into this folder.
    exit_code: when it is durable, end the program with SystemExit of this code, 1 to 255.
    """

    stop: bool = False
    save: str | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class RendezvousEntry(_Record):
    """How ranks find each other where torchrun's variables are missing, and how they meet.

    The highest priority serves.

    find: gives ``environment -> ds_core.comm.Job``, or None for a process alone; it is asked only
        where one of `variables` is set.
    store: gives ``(ds_core.comm.Rendezvous, timedelta) -> torch Store``, at which all ranks meet;
        it raises CommError within the time. None: torch's `TCPStore`.
    """

    find: Ref | None = None
    store: Ref | None = None
    variables: tuple[str, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class CommandEntry(_Record):
    """A sub-command of ``dscore``.

    load: gives a function, whose signature typer reads, or a ``typer.Typer``.
    """

    load: Ref
    help: str = ""


@dataclass(frozen=True, slots=True)
class Axis(_Record):
    """A named axis of the process mesh.

    With ``inside="dp"`` it folds into dp and does not multiply the world.

    outermost: its ranks are as far apart as can be (little is sent along it); along an axis that is
        neither that nor inside dp they are neighbours. Inside dp `size` counts the ranks of the
        axes that fold inside it, too: an axis of 8 around one of 2 has 4.
    same_batch: ranks along it, inside dp, get the same samples, to work on a part each.
    """

    name: str
    size: int
    inside: str | None = None
    outermost: bool = False
    same_batch: bool = False


class Phase(IntEnum):
    """The order in which transforms see the model."""

    SPLIT = 10
    SUBSTITUTE = 20
    PRECISION = 25
    SHARD = 30
    RECOMPUTE = 40
    COMPILE = 50


@dataclass(frozen=True, slots=True)
class Transform(_Record):
    """One step model -> model; transforms of one phase run in plugin-name order.

    For each change `apply` gives ``ctx.undo`` a step that undoes it: after `Engine.destroy` the
    model that was given is as it was, but for the values, the dtype and the device of its tensors.
    """

    phase: Phase
    apply: Callable[[nn.Module], nn.Module]


class Event(NamedTuple):
    """One metric value; `step` counts samples seen (``global_samples``)."""

    name: str
    value: float
    step: int
