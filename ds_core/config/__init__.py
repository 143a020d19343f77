"""The config: files and dicts in, one frozen and fully checked `RunConfig` out (torch-free).

Names are loaded on first use, so that a plugin's declaration module pays for `Section` and nothing
else. Reading order: `source` (text -> plain data), `section` (what a section is), `core` (the
core's own keys), `build` (the result, or all problems at once; `translate` and `unknown` find the
words for them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_core.config.build import RunConfig as RunConfig
    from ds_core.config.build import build_config as build_config
    from ds_core.config.build import check_rules as check_rules
    from ds_core.config.build import load_config as load_config
    from ds_core.config.core import CORE_KEYS as CORE_KEYS
    from ds_core.config.core import Batch as Batch
    from ds_core.config.core import CoreConfig as CoreConfig
    from ds_core.config.core import resolve_batch as resolve_batch
    from ds_core.config.section import Section as Section
    from ds_core.config.section import Trait as Trait
    from ds_core.config.section import option as option
    from ds_core.config.source import ConfigSource as ConfigSource
    from ds_core.config.source import Pairs as Pairs
    from ds_core.config.source import Unreadable as Unreadable
    from ds_core.config.source import read_config as read_config
    from ds_core.config.source import to_pairs as to_pairs

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "build": "RunConfig build_config check_rules load_config",
        "core": "CORE_KEYS Batch CoreConfig resolve_batch",
        "section": "Section Trait option",
        "source": "ConfigSource Pairs Unreadable read_config to_pairs",
    },
)
