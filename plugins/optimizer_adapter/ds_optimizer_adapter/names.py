"""Which optimizers of pytorch_optimizer update each element by itself (torch-free).

By their papers, and as the tests measure them. An option of one may still look at whole tensors
(gradient centralisation); what a config asks for is measured when it is checked.
"""

from __future__ import annotations

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
