"""The layers of a `PipelineModule` before they are built, so that each stage builds only its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError


class LayerSpec:
    """A layer that is built only where it is owned: ``typename(*module_args, **module_kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(
                f"LayerSpec needs a class of torch.nn.Module, got {typename!r}; put plain "
                "functions into the list of "
                "layers as they are"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        if log:
            print(f"building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        values = [repr(a) for a in self.module_args] + [
            f"{k}={v!r}" for k, v in self.module_kwargs.items()
        ]
        return f"{self.typename.__name__}({', '.join(values)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all others of the same `key`, on any stages.

    forward_fn: ``(module, inputs) -> outputs`` instead of the module's own call (an embedding
        reused as projection).
    tied_weight_attr: the parameters that the layers must have. All others of the module are kept
        equal too, since the layers of one key are one module, which is logged once.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )

    def build(self, log: bool = False) -> nn.Module:
        """The shared module."""
        module = super().build(log)
        if missing := [
            a for a in self.tied_weight_attr if not isinstance(getattr(module, a, None), Tensor)
        ]:
            raise UsageError(
                f"TiedLayerSpec({self.key!r}): {self.typename.__name__} has no weight "
                f"{missing[0]!r}"
            )
        return module


Layer = nn.Module | LayerSpec | Callable[[Any], Any]


def make_layer(spec: Any) -> Any:
    """The layer of a spec; a layer itself."""
    return spec.build() if isinstance(spec, LayerSpec) else spec


def make_trial(spec: Any) -> tuple[Callable[[Any], Any], nn.Module | None]:
    """A layer to measure: (how it is called, its module).

    Modules of the user are copied, they stay as they are.
    """
    if not isinstance(spec, (nn.Module, LayerSpec)):
        return spec, None
    module = copy.deepcopy(spec) if isinstance(spec, nn.Module) else spec.build()
    if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
        return functools.partial(spec.forward_fn, module), module
    return module, module


def name_of(spec: Any) -> str:
    """The name of a layer's class or function."""
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return (
        type(spec).__name__
        if isinstance(spec, nn.Module)
        else str(getattr(spec, "__name__", type(spec).__name__))
    )


def outline(spec: Any) -> Any:
    """The module of a layer, without memory where its class allows it; a function as it is."""
    if not isinstance(spec, LayerSpec):
        return spec
    try:
        with torch.device("meta"):
            return spec.build()
    except Exception:  # a constructor that looks at values
        with torch.random.fork_rng():
            return spec.build()


def count_parameters(spec: Any) -> int:
    """Trainable parameters of a layer."""
    module = outline(spec)
    if not isinstance(module, nn.Module):
        return 0
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def sections_of(specs: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """The sections of a config for which layers ask by ``ds_sections``.

    Each stage takes over those of the others: all ranks load the same plugins, and have the same
    mesh.
    """
    found: dict[str, dict[str, Any]] = {}
    for spec in _unlike(specs):
        module = outline(spec)
        for part in module.modules() if isinstance(module, nn.Module) else ():
            for section, values in getattr(part, "ds_sections", {}).items():
                found.setdefault(section, {}).update(values)
    return found


def _unlike(specs: Iterable[Any]) -> Iterator[Any]:
    """One of each kind of layer that is built in the same way."""
    seen = set()
    for spec in specs:
        if isinstance(spec, LayerSpec):
            try:
                key = (spec.typename, spec.module_args, frozenset(spec.module_kwargs.items()))
                if key in seen:
                    continue
                seen.add(key)
            except TypeError:  # arguments that have no hash: it may be unlike the others
                pass
        yield spec
