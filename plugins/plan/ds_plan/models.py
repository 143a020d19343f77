"""The model that is planned, on the meta device: it has shapes and takes no memory."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ds_command_kit.show import check_file
from torch import nn

from ds_core.errors import UsageError

UNITS = {
    "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_amount(text: str, option: str) -> int:
    """``"7B"``, ``"350M"``, ``"80GB"``, ``"1.5TiB"`` as a number.

    Raises UsageError that names `option`.
    """
    match = re.fullmatch(r"\s*([0-9][0-9_]*\.?[0-9]*)\s*([A-Za-z]*)\s*", text)
    # Without a unit nobody can tell 80 bytes from 80 gigabytes.
    unit = UNITS.get(match.group(2).lower()) if match and match.group(2) else None
    if (
        match is None
        or unit is None
        or (amount := round(float(match.group(1).replace("_", "")) * unit)) < 1
    ):
        raise UsageError(
            f"{option} is {text!r}; write a number with a unit, such as 7B, 350M, 80GB or 1.5TiB"
        )
    return amount


def of_size(params: int, largest: int) -> nn.Module:
    """A chain of layers with one matrix each, of `largest` elements but for the last: `params`
    together.
    """
    if not 0 < largest <= params:
        raise UsageError(
            f"--largest-layer is {largest}; it must be from 1 to the {params} parameters of the "
            "model"
        )
    chain = nn.Sequential()
    for begin in range(0, params, largest):
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.empty(1, min(largest, params - begin), device="meta"))
        chain.append(layer)
    return chain


def divide_matrices(model: nn.Module, ranks: int) -> nn.Module:
    """A copy with one rank's part of every matrix; other parameters stay as they are.

    Tensor parallelism divides each along one of its dimensions; only sizes count here, so all are
    divided along the first. The layers of `of_size` count as matrices. Gives `model` itself for one
    rank.
    """
    if ranks == 1:
        return model
    # Modules that share a weight must share its part too.
    parts: dict[nn.Parameter, nn.Parameter] = {}
    divided = copy.deepcopy(model)
    for module in divided.modules():
        for name, param in module._parameters.items():
            if param is not None and (param.dim() > 1 or type(module) is nn.Module):
                shape = (-(-param.shape[0] // ranks), *param.shape[1:])
                made = nn.Parameter(param.new_empty(shape), requires_grad=param.requires_grad)
                module._parameters[name] = parts.setdefault(param, made)
    return divided


def find_model(source: str) -> nn.Module:
    """The model of ``module:function`` (called without arguments) or of a Hugging Face
    ``config.json``.

    Raises UsageError when it cannot be found, or does not return a module.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        return _from_hugging_face(path / "config.json" if path.is_dir() else path)
    build = _find_function(source)
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:  # the user's code
        raise UsageError(
            f"--model {source}: building it failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {source}: returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model


def _find_function(source: str) -> Callable[[], Any]:
    name, _, attribute = source.partition(":")
    if not attribute:
        raise UsageError(
            f"--model is {source!r}; write module:function, or the path of a Hugging Face "
            "config.json"
        )
    if "" not in sys.path:
        # Modules in the working directory can be named, as for python -m.
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"--model {source}: the module {name} fails: {error}") from error
        raise UsageError(
            f"--model {source}: there is no module {error.name!r}, neither in {os.getcwd()!r} nor on "
            "PYTHONPATH"
        ) from error
    except ImportError as error:
        raise UsageError(f"--model {source}: the module {name} fails: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"--model {source}: the module {name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"--model {source}: {attribute} is not a function")
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"--model {source}: needs arguments ({', '.join(needed)}); name a function without any"
        )
    return found  # type: ignore[no-any-return]


def _from_hugging_face(path: Path) -> nn.Module:
    check_file(path, "config.json of a model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: it is not JSON: {error}") from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UsageError(
            f"--model {path}: has no model_type, so it is not a Hugging Face config.json"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise UsageError(
            f"--model {path}: needs the transformers library, which is not installed; pip install "
            "transformers, or "
            "give --params"
        ) from None
    try:
        config = transformers.AutoConfig.for_model(**raw)
        named = [
            getattr(transformers, n)
            for n in raw.get("architectures") or ()
            if hasattr(transformers, n)
        ]
        with torch.device("meta"):
            # Without the config's dtype: a run's model is in fp32 too before it is cast.
            model = named[0](config) if named else transformers.AutoModel.from_config(config)
    except Exception as error:  # any of a large library's
        raise UsageError(
            f"--model {path}: transformers cannot build it: {type(error).__name__}: {error}"
        ) from error
    assert isinstance(model, nn.Module)
    return model
