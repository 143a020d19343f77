"""Inference: trained models answer, through programs of ds-inference-kit where their family is
known.

Names load on first use, so that this package loads no torch when imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_inference.config import DeepSpeedInferenceConfig
    from ds_inference.engine import InferenceEngine
    from ds_inference.init import default_inference_config, init_inference

__all__ = [
    "DeepSpeedInferenceConfig",
    "InferenceEngine",
    "default_inference_config",
    "init_inference",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "config": "DeepSpeedInferenceConfig",
        "engine": "InferenceEngine",
        "init": "default_inference_config init_inference",
    },
)
