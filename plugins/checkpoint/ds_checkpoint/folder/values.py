"""Values as JSON plus tensors, and back with the same types: what client state and run state are
stored as.

JSON's own types are stored as they are. An object with one key that starts with "$" represents what
JSON lacks: ``{"$tuple": [...]}``, ``{"$float": "nan"}``, ``{"$tensor": key}``, and mappings that
are not plain: ``{"$dict" | "$ordered" | "$counter": [[key, value], ...]}``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ds_checkpoint.folder.tensorfile import check_tensor
from ds_core.errors import CheckpointError

_DEEPEST = 100
_WIDEST = 8192  # bits of an int; Python refuses to print much longer ones
_MAPPINGS: dict[str, type] = {"$ordered": OrderedDict, "$counter": Counter, "$dict": dict}
_FIXES = {
    "set": "store sorted(it)",
    "frozenset": "store sorted(it)",
    "ndarray": "store torch.from_numpy(it)",
    "bytes": "store it.hex()",
    "bytearray": "store it.hex()",
    "defaultdict": "store dict(it)",
    "complex": "store (it.real, it.imag)",
    "datetime": "store it.isoformat()",
    "Size": "store tuple(it)",
    "dtype": "store str(it)",
    "device": "store str(it)",
    "Generator": "store it.get_state()",
}


def encode(
    value: Any, where: str, tensors: dict[str, Tensor], *, own: bool = False, depth: int = 0
) -> Any:
    """`value` as JSON.

    where: its path, for errors.

    Tensors go into `tensors`, under keys made from the path's head.

    own: a state of ours or torch's, in which mappings may have int keys (a MultiStepLR's
        milestones, for one).

    Raises CheckpointError, naming the path and the fix, for anything that would not be decoded to
    an equal value.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int and value.bit_length() <= _WIDEST:
        return value
    # JSON has no NaN and no infinity.
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    # Exactly these: a subclass would come back as a plain tensor.
    if kind in (Tensor, nn.Parameter):
        check_tensor(value, where)
        key = f"{where.partition('[')[0]}/{len(tensors)}"
        tensors[key] = value
        return {"$tensor": key}
    if depth >= _DEEPEST:
        raise CheckpointError(
            f"{where[:80]}... is nested more than {_DEEPEST} deep, or holds itself; flatten it"
        )
    if kind in (list, tuple):
        rows = [
            encode(v, f"{where}[{i}]", tensors, own=own, depth=depth + 1)
            for i, v in enumerate(value)
        ]
        return rows if kind is list else {"$tuple": rows}
    if kind in _MAPPINGS.values():
        return _encode_mapping(value, where, tensors, own, depth)
    raise CheckpointError(
        f"{where} is a {_name(kind)}, which a checkpoint cannot hold; {_fix(value)}"
    )


def _encode_mapping(
    value: Any, where: str, tensors: dict[str, Tensor], own: bool, depth: int
) -> Any:
    pairs = []
    for key, item in value.items():
        if type(key) is not str and not (own and type(key) is int):
            raise CheckpointError(
                f"{where} has the key {key!r} of type {_name(type(key))}; checkpoints keep only "
                "str keys: use str(key)"
            )
        pairs.append([key, encode(item, f"{where}[{key!r}]", tensors, own=own, depth=depth + 1)])
    # A plain mapping stays readable JSON. One whose keys could be taken for ours is written as
    # pairs.
    if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value):
        return dict(pairs)
    return {next(tag for tag, kind in _MAPPINGS.items() if kind is type(value)): pairs}


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _fix(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Tensor):
        return (
            "store a plain tensor (for a DTensor its full_tensor(), else "
            ".as_subclass(torch.Tensor))"
        )
    if type(value).__module__ == "numpy" and name not in _FIXES:
        return "store it.item()"
    if name in _FIXES:
        return _FIXES[name]
    if isinstance(value, int):
        return "store int(it)" if type(value) is not int else "store str(it)"
    for plain in (float, str, tuple, list, dict):
        if isinstance(value, plain):
            return f"store {plain.__name__}(it)"
    if hasattr(value, "__fspath__"):
        return "store str(it)"
    if hasattr(value, "state_dict"):
        return "store its state_dict()"
    return "store None, bool, int, float, str, tensors, and lists, tuples and dicts of them"


def decode(data: Any, tensor: Callable[[str], Tensor], where: str, depth: int = 0) -> Any:
    """The reverse of `encode`; CheckpointError for what that never makes.

    tensor: gives the tensor of a key.
    """
    if not isinstance(data, (list, dict)):
        return data
    if depth >= _DEEPEST:
        raise CheckpointError(
            f"{where}: values are nested more than {_DEEPEST} deep, which is never written"
        )

    def inside(value: Any) -> Any:
        return decode(value, tensor, where, depth + 1)

    if isinstance(data, list):
        return [inside(v) for v in data]
    if not any(key.startswith("$") for key in data):
        return {k: inside(v) for k, v in data.items()}
    # An encoded object has one key, which names its type.
    (tag, inner), *rest = data.items()
    try:
        if rest:
            raise ValueError(tag)
        if tag == "$tuple":
            return tuple(inside(v) for v in inner)
        if tag == "$float":
            return float(inner)
        if tag == "$tensor":
            return tensor(inner)
        return _MAPPINGS[tag]({k: inside(v) for k, v in inner})
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{where}: {error} is not a value that a checkpoint can hold"
        ) from error
