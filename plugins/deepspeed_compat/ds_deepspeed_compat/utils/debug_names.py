"""``deepspeed.utils.debug``: names of parameters and modules for messages."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_NAMES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Names by module; parameters, which compare by value, have theirs by id below."""
_PARAMS: dict[int, tuple[weakref.ref[Any], str]] = {}


def debug_clear_module_and_param_names() -> None:
    """Forget all names."""
    _NAMES.clear()
    _PARAMS.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Take the names of a model's modules and parameters."""
    debug_clear_module_and_param_names()
    _NAMES.update({module: name for name, module in model.named_modules()})
    _PARAMS.update(
        {id(param): (weakref.ref(param), name) for name, param in model.named_parameters()}
    )


def debug_module2name(module: Any) -> str:
    """The module's name, or "unknown"."""
    return _NAMES.get(module, "unknown")


def debug_module2class(module: Any) -> str:
    """The name of the module's class."""
    return type(module).__name__


def debug_module2name_id(module: Any) -> str:
    """``name=... id=...``; ids are those of an engine at stage 3."""
    return f"name={debug_module2name(module)} id={_of(module, 'ds_id')}"


def debug_module2name_class(module: Any) -> str:
    """``name=... class_name=... id=...``."""
    return (
        f"name={debug_module2name(module)} class_name={debug_module2class(module)} "
        f"id={_of(module, 'ds_id')}"
    )


def debug_param2name(param: Any) -> str:
    """The parameter's name, or "unknown"."""
    # The id may be that of a parameter that is gone.
    kept, name = _PARAMS.get(id(param), (lambda: None, "unknown"))
    return name if kept() is param else "unknown"


def _of(thing: Any, attribute: str) -> Any:
    return getattr(thing, attribute, "unknown")


def debug_param2name_id(param: Any) -> str:
    """``name=... id=...``."""
    return f"name={debug_param2name(param)} id={_of(param, 'ds_id')}"


def debug_param2name_id_shape(param: Any) -> str:
    """With the shapes: as it is, and the whole parameter's."""
    return (
        f"{debug_param2name_id(param)} shape={tuple(param.shape)} ds_shape={_of(param, 'ds_shape')}"
    )


def debug_param2name_id_shape_device(param: Any) -> str:
    """With the device."""
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: Any) -> str:
    """With the number of elements."""
    return f"{debug_param2name_id(param)} numel={param.numel()}"


def debug_param2name_id_shape_status(param: Any) -> str:
    """With whether it is gathered."""
    return f"{debug_param2name_id_shape(param)} status={_of(param, 'ds_status')}"


def print_rank(*words: Any, force: bool = False) -> None:
    """Print with the rank, where `force`."""
    from ds_core import comm

    if force:
        print(f"[rank {comm.rank()}]", *words)


def print_rank0(*words: Any, force: bool = False) -> None:
    """Print on rank 0, where `force`."""
    from ds_core import comm

    if force and comm.rank() == 0:
        print("[rank 0]", *words)
