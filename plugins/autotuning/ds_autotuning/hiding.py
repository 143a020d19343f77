"""Which texts of a config are secret, by the marks of the sections' models and by their names
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_core.config.keys import secret_names
from ds_core.config.redaction import redact, secrets_in
from ds_core.errors import PluginError


def marked_secret(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of keys that models of the config's sections mark; a section whose plugin is broken
    marks none.
    """
    from ds_core.plugins import Plugins

    plugins = Plugins()
    models = []
    for name in set(plugins.sections()) & set(config):
        try:
            models += [model for model, _ in plugins.models([name]).values()]
        except PluginError:
            continue
    return secret_names(models)


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which secrets are ``***``."""
    shown: dict[str, Any] = redact(dict(config), marked_secret(config))
    return shown


def texts_to_hide(config: Mapping[str, Any]) -> set[str]:
    """What no page or summary may contain."""
    return secrets_in(dict(config), marked_secret(config))


def secret_paths(config: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values are secret, in the order of the config."""
    return list(_differing(config, shown_config(config), ""))


def _differing(config: Any, shown: Any, path: str) -> Any:
    if isinstance(config, Mapping) and isinstance(shown, Mapping):
        for key, value in config.items():
            yield from _differing(value, shown[key], f"{path}.{key}" if path else str(key))
    elif config != shown:
        yield path
