"""The config: files and dicts in, one frozen and fully checked `RunConfig` out (torch-free).

Names are loaded on first use, so that a plugin's declaration module pays for `Section` and nothing else.
Reading order: `source` (text -> plain data), `section` (what a section is), `core` (the core's own keys),
`build` (all problems at once), `run` (the result).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.lazy import names_on_first_use

if TYPE_CHECKING:
    from ds_core.config.batch import Batch, resolve_batch, with_micro_batch_size, with_train_batch_size
    from ds_core.config.build import build_config, plugin_settings
    from ds_core.config.core import CORE_KEYS, CoreConfig
    from ds_core.config.parse import Pairs, Unreadable, to_pairs
    from ds_core.config.redaction import REDACTED, is_secret_name, redact
    from ds_core.config.run import RunConfig
    from ds_core.config.section import Section, not_built, option, secret
    from ds_core.config.source import ConfigSource, read_config
    from ds_core.config.translate import translate_errors


__all__ = [
    "CORE_KEYS",
    "REDACTED",
    "Batch",
    "ConfigSource",
    "CoreConfig",
    "RunConfig",
    "Pairs",
    "Section",
    "Unreadable",
    "build_config",
    "is_secret_name",
    "not_built",
    "option",
    "plugin_settings",
    "read_config",
    "redact",
    "resolve_batch",
    "secret",
    "with_micro_batch_size",
    "with_train_batch_size",
    "to_pairs",
    "translate_errors",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "batch": "Batch resolve_batch with_micro_batch_size with_train_batch_size",
        "build": "build_config plugin_settings",
        "core": "CORE_KEYS CoreConfig",
        "parse": "Pairs Unreadable to_pairs",
        "redaction": "REDACTED is_secret_name redact",
        "run": "RunConfig",
        "section": "Section not_built option secret",
        "source": "ConfigSource read_config",
        "translate": "translate_errors",
    },
)
