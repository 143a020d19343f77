"""The section ``hybrid_engine``, with every documented key (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option


class HybridEngine(Section):
    """``engine.generate`` between training steps, with the weights as they are then."""

    enabled: bool = option(
        False, "Give the engine `generate`, by the programs of dscore-inference."
    )
    max_out_tokens: int = option(512, "The most tokens of a prompt and its answer together.", ge=1)
    inference_tp_size: int = option(
        1,
        "Ranks that divide the layers while generating: 1, or as many as in training "
        "(autotp_size).",
        ge=1,
    )
    release_inference_cache: bool = option(
        False, "Free the cache of keys and values after each generation."
    )
    pin_parameters: bool = option(
        True,
        "Keep a copy of the weights for inference in place.",
        without_effect="generation reads the weights that are trained, there is no copy of them",
    )
    tp_gather_partition_size: int = option(
        8,
        "Stage 3 gathers all weights before it generates: how many gathers are under way at a "
        "time.",
        ge=1,
    )
    enable_cuda_graph: bool = option(
        False,
        "Record the steps of decoding as CUDA graphs; an error where the kernels cannot. Not with "
        "stage 3.",
    )
