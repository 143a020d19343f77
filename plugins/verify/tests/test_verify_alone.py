"""The declaration, which needs no other package of this repository's."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_verify.plugin"
    section = "verify"
    good_config: ClassVar[Any] = {
        "role": "replay",
        "folder": "here",
        "source": "there",
        "steps": 2,
        "seed": 3,
        "perturb": True,
        "limit": 1000,
    }
