"""``deepspeed.module_inject.replace_policy``: policies as values of `injection_policy`, for
families that are known.

A policy says only which layers it is for: what is in them, and which of their linears are divided,
the family says.
"""

from __future__ import annotations


class LayerPolicy:
    """A family that is known by itself.

    layer: the class of its layers, in transformers.
    """

    layer = ""


class HFBertLayerPolicy(LayerPolicy):
    """BERT."""

    layer = "BertLayer"


class HFDistilBertLayerPolicy(LayerPolicy):
    """DistilBERT."""

    layer = "TransformerBlock"


class HFGPT2LayerPolicy(LayerPolicy):
    """GPT-2."""

    layer = "GPT2Block"


class HFGPTNEOLayerPolicy(LayerPolicy):
    """GPT-Neo."""

    layer = "GPTNeoBlock"


class GPTNEOXLayerPolicy(LayerPolicy):
    """GPT-NeoX."""

    layer = "GPTNeoXLayer"


class HFOPTLayerPolicy(LayerPolicy):
    """OPT."""

    layer = "OPTDecoderLayer"


class BLOOMLayerPolicy(LayerPolicy):
    """BLOOM."""

    layer = "BloomBlock"


class LLAMALayerPolicy(LayerPolicy):
    """LLaMA."""

    layer = "LlamaDecoderLayer"


replace_policies = [
    HFBertLayerPolicy,
    HFGPTNEOLayerPolicy,
    GPTNEOXLayerPolicy,
    HFGPT2LayerPolicy,
    BLOOMLayerPolicy,
    HFOPTLayerPolicy,
    HFDistilBertLayerPolicy,
    LLAMALayerPolicy,
]
"""All of them."""
