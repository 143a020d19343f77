"""Models of transformers as inference programs: `lower` reads a model of a known family and says
what it computes.

Nothing is guessed. A module, an activation or a field of a configuration that is not known means
that there is no program; the model then computes by itself. `description` has the words for all
families, `llama`, `gpt` and `encoders` read theirs, `emit` makes the instructions, `finish` goes
from the program's output to that of the model.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from ds_inference_kit.program import Program
from ds_run_state.divided import divided
from torch import nn

from ds_inference.families.description import Transformer
from ds_inference.families.emit import Derived, emit
from ds_inference.families.finish import finisher
from ds_inference.families.reading import Unknown, plain

__all__ = ["FAMILIES", "Kind", "Lowered", "lower", "why_not"]

logger = logging.getLogger(__name__)

FAMILIES = {
    "LlamaModel": "llama:llama",
    "MistralModel": "llama:mistral",
    "MixtralModel": "llama:mixtral",
    "Qwen2Model": "llama:qwen2",
    "Qwen3Model": "llama:qwen3",
    "GPT2Model": "gpt:gpt2",
    "GPTNeoModel": "gpt:gpt_neo",
    "GPTNeoXModel": "gpt:gpt_neox",
    "OPTModel": "gpt:opt",
    "BloomModel": "gpt:bloom",
    "BertModel": "encoders:bert",
    "DistilBertModel": "encoders:distilbert",
}
"""The class of a family's base model, and the function that reads it."""
HEADS = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "ForNextSentencePrediction",
    "ForPreTraining",
)
"""Models whose own forward does the rest after the last hidden states."""
DTYPES = torch.float32, torch.bfloat16, torch.float16


class Kind(Enum):
    """CAUSAL: a token sees those before it, there is a cache. ENCODER: it sees all."""

    CAUSAL = 0
    ENCODER = 1


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """A program, and what its callers need to know of its model."""

    program: Program
    # How many logits a row has; None: the program ends at the last hidden states.
    vocab: int | None
    # How many tokens there are.
    words: int
    # None: any number.
    max_positions: int | None
    # The tokens that end a text.
    eos: tuple[int, ...]
    kind: Kind
    # What the program gave for a batch [b, t, ...] and the keywords of the model's forward -> the
    # model's output, by its own code.
    finish: Callable[..., Any]
    # The embedding of tokens.
    embedding: nn.Embedding
    # See `Transformer`.
    counted: bool
    # `finish` reads the first column of a batch, padding or not.
    first: bool
    # Tensors that are made from parameters, for `refresh`.
    derived: tuple[Derived, ...]

    def refresh(self) -> None:
        """Make anew what is derived from parameters, after they moved.

        `Runnable.rebind` comes after it.
        """
        for each in self.derived:
            each.tensor.data = each.make()


def lower(model: nn.Module, dtype: torch.dtype | None = None) -> Lowered | None:
    """The program of a model of transformers; None, and the reason in the log, where there is none.

    dtype: of the activations; None: that of the token embedding. The weights are the model's own,
    whatever their dtype.
    """
    try:
        return _lower(model, dtype)
    except Unknown as why:
        logger.info(
            "%s has no inference program and computes by itself: %s", type(model).__name__, why
        )
        return None


def why_not(model: nn.Module) -> str | None:
    """Why `lower` returns None, or None where it does not."""
    try:
        _lower(model, None)
    except Unknown as why:
        return str(why)
    return None


def _lower(model: Any, dtype: torch.dtype | None) -> Lowered:
    base: Any = getattr(model, "base_model", None)
    name = type(base).__name__
    if name not in FAMILIES or not type(base).__module__.startswith("transformers.models."):
        raise Unknown(
            f"its family ({name}) is not known"
            if base is not None
            else "it is no transformers model"
        )
    plain(base)
    for asked in ("output_attentions", "output_hidden_states"):
        if getattr(model.config, asked, False):
            raise Unknown(f"{asked} of its configuration asks for more than a program gives")
    file, function = FAMILIES[name].split(":")
    try:
        described: Transformer = getattr(importlib.import_module(f"{__name__}.{file}"), function)(
            base
        )
    except AttributeError as missing:  # another version of transformers
        raise Unknown(f"it is built in another way: {missing}") from missing
    dtype = dtype or model.get_input_embeddings().weight.dtype
    if dtype not in DTYPES:
        raise Unknown(f"activations of {dtype} are not served")
    head = _head(model, base)
    pooled = base._modules.get("pooler") is not None
    program, derived = emit(described, head, dtype)
    return Lowered(
        program=program,
        vocab=None if head is None else program.widths[program.output],
        words=model.config.vocab_size
        if divided(described.tokens)
        else described.tokens.num_embeddings,
        max_positions=described.most,
        eos=_eos(model),
        kind=Kind.CAUSAL if described.causal else Kind.ENCODER,
        finish=finisher(model, base, head is not None),
        embedding=described.tokens,
        counted=described.counted,
        first=not described.causal
        and (pooled or type(model).__name__.endswith("ForSequenceClassification")),
        derived=derived,
    )


def _head(model: Any, base: nn.Module) -> nn.Module | None:
    """The output head of a causal model, whose forward is a product after the base model and
    nothing more.

    None: the model is its base, or its own forward is run after that (`finish`).
    """
    kind = type(model)
    rest = kind.__name__.removeprefix(type(base).__name__.removesuffix("Model"))
    if not kind.__module__.startswith("transformers.models.") or "forward" in vars(model):
        raise Unknown("its class is not one of transformers, or it computes in its own way")
    # BERT's is more than a product
    if rest in ("ForCausalLM", "LMHeadModel") and not hasattr(model, "cls"):
        head = model.get_output_embeddings()
        if isinstance(head, nn.Module):
            return head
    if rest not in HEADS:
        raise Unknown(f"the outputs of {kind.__name__} are not served")
    return None


def _eos(model: Any) -> tuple[int, ...]:
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (found,)
    return ()
