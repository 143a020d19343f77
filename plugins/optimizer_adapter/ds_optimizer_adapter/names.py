"""Which optimizers of pytorch_optimizer update each element by itself, and their references
(torch-free).

By their papers, and as the tests measure them. An option of one may still look at whole tensors
(gradient centralisation); what a config asks for is measured when it is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "pytorch_optimizer"
KEY = "optimizer_adapter.grain"

ELEMENTWISE = (
    "ADOPT",
    "AdEMAMix",
    "AdaBelief",
    "AdaBound",
    "AdaDelta",
    "AdaMax",
    "AdaMod",
    "AdaPNM",
    "Adan",
    "AggMo",
    "DiffGrad",
    "EXAdam",
    "Grams",
    "Lion",
    "MSVAG",
    "PAdam",
    "PID",
    "PNM",
    "QHM",
    "SGDW",
    "SignSGD",
    "SimplifiedAdEMAMix",
    "Tiger",
    "Yogi",
)
"""Classes of pytorch_optimizer that may be cut anywhere, with their defaults."""
UNNAMED = ("adam_debias", "adanorm", "adanorm_r", "cautious", "foreach", "stable_adamw", "use_gc")
"""What their updates read of ``**kwargs``, in which constructors take any other name in silence."""


def __getattr__(name: str) -> Callable[..., Any]:
    """The class of that name, from the package that has it."""
    if name not in ELEMENTWISE:
        raise AttributeError(name)
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise ImportError(
            f"{PACKAGE}.{name} needs the package pytorch_optimizer ({error}); "
            'pip install "ds-optimizer-adapter[pytorch-optimizer]"'
        ) from None
    found: Callable[..., Any] = getattr(pytorch_optimizer, name)
    return found
