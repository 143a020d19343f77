"""`injection_policy`: the user names linears whose outputs are summed over ranks, by the class of
the layer around.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ds_core.errors import ConfigError
from ds_inference.config import DeepSpeedInferenceConfig
from ds_inference.layer_policies import LayerPolicy


def row_names(config: DeepSpeedInferenceConfig, model: nn.Module) -> tuple[str, ...]:
    """The ends of names of these linears.

    ConfigError where the model has no such layer, or it no such linear.
    """
    found = list(config.injection_policy_tuple or ())
    if absent := [name for name in found if not _is_in(name, [model])]:
        shown = ", ".join(map(repr, absent))
        raise ConfigError(
            f"the model has no {shown}; give names of its linears", "injection_policy_tuple"
        )
    for layer, given in (config.injection_policy or {}).items():
        inside = [m for m in model.modules() if type(m) is layer or type(m).__name__ == layer]
        shown = layer.__name__ if isinstance(layer, type) else str(layer)
        if not inside:
            raise ConfigError(f"the model has no {shown}", "injection_policy")
        if isinstance(given, type) and issubclass(given, LayerPolicy):
            if given.layer != shown:
                why = (
                    f"{given.__name__} is for {given.layer}, not for {shown}; give names of "
                    "linears that are summed"
                )
                raise ConfigError(why, "injection_policy")
            continue  # the family says what is divided
        names = _names(given, shown)
        for name in names:
            if not _is_in(name, inside):  # some may lack it: cross attention is in decoders alone
                raise ConfigError(
                    f"{shown} has no {name!r}; give names of its linears", "injection_policy"
                )
        found += names
    return tuple(dict.fromkeys(found))


def _is_in(name: str, modules: Iterable[nn.Module]) -> bool:
    """Whether a layer inside has a name that ends so."""
    return any(
        name == n or n.endswith("." + name) for module in modules for n, _ in module.named_modules()
    )


def _names(given: object, layer: str) -> list[str]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, Iterable):
        names = list(given)
        if names and all(isinstance(n, str) for n in names):
            return names
    raise ConfigError(
        f"{layer}: give the names of linears whose outputs are summed, such as "
        "('attention.output.dense', "
        "'output.dense'); classes of policies are not needed, as families are known by themselves",
        "injection_policy",
    )
