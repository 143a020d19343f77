"""What the distributions of this repository offer, whether they are installed or not (torch-free).

``catalogue.json`` is generated from their entry points by ``make catalogue``, and a test holds it current. So the core
never says "not built yet" of a distribution that exists. Names that the documents have and nobody offers yet are listed
here by hand; the catalogue goes before them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["PLANNED", "install", "known", "offered_by"]

PLANNED: Mapping[str, Mapping[str, str]] = {
    "optimizers": dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "ds-optimizers"),
    "state_stores": {"nvme": "ds-offload"},
}
"""Kind -> documented name -> the distribution that will offer it."""


@functools.cache
def _catalogue() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return found


def known(kind: str) -> frozenset[str]:
    """Every name of a kind ("sections", "optimizers", "schedulers", "state_stores", "commands"), planned ones too."""
    return frozenset({*_catalogue().get(kind, ()), *PLANNED.get(kind, ())})


def offered_by(kind: str, name: str) -> str | None:
    """The distribution of this repository that offers `name` (in any case); None when none does."""
    return next((dist for n, dist in _catalogue().get(kind, {}).items() if n.lower() == name.lower()), None)


def install(dist: str) -> str:
    """How to install a distribution, to go into a sentence. Those of this repository are published nowhere yet."""
    folder = _catalogue()["folders"].get(dist)
    return f"`pip install {dist}`" if folder is None else f"`pip install ./{folder}` in a checkout of ds_core"
