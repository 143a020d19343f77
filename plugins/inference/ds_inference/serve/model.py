"""Opens what is served: a folder with a model and a tokenizer in Hugging Face's format, or a GGUF file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_cli.show import CommandError
from ds_inference_kit.step import BLOCK

from ds_inference.serve.errors import Refusal

if TYPE_CHECKING:
    from ds_inference.generation import Generator

__all__ = ["PLAIN_TEMPLATE", "Choices", "Served", "Tokens", "open_model"]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{{ 'assistant:' }}"
)
"""For models without a template: a line for each message, ``role: content``, then ``assistant:``."""


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CACHE = 16_384
"""Tokens in the KV cache, unless said or the context is longer."""


@dataclass(frozen=True)
class Served:
    """A model that is ready. most_tokens: of a prompt and its answer together."""

    name: str
    generator: Generator
    tokens: Tokens
    most_tokens: int


class Tokens:
    """Text to tokens and back by a tokenizer of transformers. vocabulary: tokens are below it."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self.vocabulary = tokenizer, vocabulary
        self._template = tokenizer.chat_template or PLAIN_TEMPLATE
        ordinary = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor, self._anchor_text = ordinary, self.decode(ordinary)
        self.piece: Callable[[int], str] = functools.lru_cache(1 << 17)(self._piece)

    def encode(self, text: str) -> list[int]:
        """The prompt `text`."""
        return list(self._tokenizer.encode(text))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt that asks for the assistant's next message; Refusal where the model's template refuses them."""
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise Refusal(400, f"the model's chat template refuses these messages: {error}", param="messages") from None
        return list(self._tokenizer.encode(text, add_special_tokens=self._template is PLAIN_TEMPLATE))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special ones left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _piece(self, token: int) -> str:
        """One token as it reads inside a text; special ones by their name."""
        text = self._tokenizer.decode([*self._anchor, token], clean_up_tokenization_spaces=False)
        return str(text[len(self._anchor_text) :])


@dataclass(frozen=True)
class Choices:
    """How to load a model; None: what suits it. checkpoint: one of ds_core, whose weights take the place of MODEL's."""

    dtype: str | None = None
    quantize: str | None = None
    cache_tokens: int | None = None
    tp: int = 1
    threads: int | None = None
    checkpoint: Path | None = None


def open_model(path: Path, name: str | None, choices: Choices) -> Served:
    """Load the model and the tokenizer at `path`; CommandError where that cannot be done."""
    import torch

    if choices.threads is not None:
        torch.set_num_threads(choices.threads)
    if not path.is_file() and not (path / "config.json").is_file():
        what = "is no folder" if not path.is_dir() else "has no config.json"
        raise CommandError(f"{path} {what}; MODEL is a folder in Hugging Face's format, or a GGUF file")
    floats = choices.dtype or ("bf16" if choices.quantize or torch.accelerator.is_available() else "fp32")
    model, tokenizer = _load(path, choices)
    most = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048)
    generator = _generator(model.to(getattr(torch, _DTYPES[floats])), choices.cache_tokens or max(most, _CACHE))
    most = min(most, generator.max_positions, generator.blocks * BLOCK)
    vocabulary = model.config.get_text_config().vocab_size
    return Served(name or path.resolve().stem, generator, Tokens(tokenizer, vocabulary), most)


def _generator(model: Any, cache_tokens: int) -> Generator:
    from ds_core.kernels import Kernels
    from ds_core.plugins import Plugins
    from ds_inference.families import lower
    from ds_inference.generation import Generator

    model = model.eval()
    lowered = lower(model)
    if lowered is None or lowered.max_positions is None:
        raise CommandError(f"{type(model).__name__} is of no family that can be served")
    device = next(model.parameters()).device
    load = Kernels(Plugins()).get("inference_program", device.type, str(lowered.program.dtype).removeprefix("torch."))
    return Generator(
        load(lowered.program), program=lowered.program, vocab=lowered.vocab, max_positions=lowered.max_positions,
        cache_tokens=cache_tokens, eos=lowered.eos, device=device,
    )  # fmt: skip


def _load(path: Path, choices: Choices) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]

    place, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    only: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **only)
        if choices.checkpoint is None:
            return AutoModelForCausalLM.from_pretrained(place, use_safetensors=True, dtype="auto", **only), tokenizer
        config = AutoConfig.from_pretrained(place, **only)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), tokenizer  # type: ignore[no-untyped-call]
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise CommandError(f"{path} cannot be loaded by transformers: {error}") from error
