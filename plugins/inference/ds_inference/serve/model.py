"""Opens what is served: a folder with a model and a tokenizer in Hugging Face's format, or a GGUF
file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_command_kit.show import CommandError
from ds_inference_kit.step import BLOCK

from ds_inference.serve.driver import Link
from ds_inference.serve.http.errors import Refusal

if TYPE_CHECKING:
    from ds_inference.generate.generator import Generator

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% "
    "endfor %}"
    "{{ 'assistant:' }}"
)
"""For models without a template: a line for each message, ``role: content``, then ``assistant:``.
"""


_CONTEXT = 2_048
"""Tokens of a sequence, where a model does not say how many it takes."""
_CACHE = 16_384
"""Tokens in the KV cache, unless said or the context is longer."""


@dataclass(frozen=True)
class Served:
    """A model that is ready."""

    # What requests call it.
    name: str
    generator: Generator
    tokens: Tokens
    # The most tokens of a prompt and its answer together.
    most_tokens: int
    # Joins the ranks that divide it.
    link: Link = lambda commands: commands


class Tokens:
    """Text to tokens and back by a tokenizer of transformers.

    vocabulary: tokens are below it.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._template = tokenizer.chat_template or PLAIN_TEMPLATE
        # A token decoded alone loses its leading space in many tokenizers: it is decoded behind an
        # ordinary one, whose text is then cut off.
        ordinary = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self.decode(ordinary)
        self._anchor = ordinary
        # Logprobs name the same tokens again and again.
        self.piece: Callable[[int], str] = functools.lru_cache(1 << 17)(self._piece)

    def encode(self, text: str) -> list[int]:
        """The prompt `text`."""
        return list(self._tokenizer.encode(text))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt that asks for the assistant's next message; Refusal where the model's template
        refuses them.
        """
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:  # what a template does is its own
            why = str(error) if isinstance(error, TemplateError) else type(error).__name__
            raise Refusal(
                400, f"the model's chat template refuses these messages: {why}", param="messages"
            ) from None
        return list(
            # A model's own template writes its special tokens itself.
            self._tokenizer.encode(text, add_special_tokens=self._template is PLAIN_TEMPLATE)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special ones left out."""
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _piece(self, token: int) -> str:
        """One token as it reads inside a text; special ones by their name."""
        text = self._tokenizer.decode([*self._anchor, token], clean_up_tokenization_spaces=False)
        return str(text[len(self._anchor_text) :])


@dataclass(frozen=True)
class Choices:
    """How to load a model; None: what suits it."""

    dtype: str | None = None
    # int8 or int4, of linear layers.
    quantize: str | None = None
    # The size of the KV cache: tokens of all running requests.
    cache_tokens: int | None = None
    # Ranks that divide the model.
    tp: int = 1
    # How many CPU threads compute.
    threads: int | None = None
    # A checkpoint of ds_core, whose weights replace MODEL's.
    checkpoint: Path | None = None


def open_model(path: Path, name: str | None, choices: Choices) -> Served:
    """Load the model and the tokenizer at `path`; CommandError where that cannot be done."""
    import torch

    from ds_core import comm
    from ds_inference.init import init_inference

    if choices.threads is not None:
        torch.set_num_threads(choices.threads)
    if not path.is_file() and not (path / "config.json").is_file():
        what = "is no folder" if not path.is_dir() else "has no config.json"
        raise CommandError(
            f"{path} {what}; MODEL is a folder in Hugging Face's format, or a GGUF file"
        )
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if ranks != choices.tp:
        how = (
            f"dscore run --nproc {choices.tp} --module ds_cli serve ..."
            if choices.tp > 1
            else f"--tp {ranks}"
        )
        raise CommandError(
            f"--tp {choices.tp} needs as many ranks, and this job has {ranks}; start it with {how}"
        )
    if choices.quantize is not None and choices.dtype not in (None, "bf16"):
        raise CommandError(
            f"--dtype {choices.dtype}: beside --quantize what stays floats is bf16; leave "
            "--dtype out"
        )
    floats = choices.dtype or ("bf16" if torch.accelerator.is_available() else "fp32")
    model, tokenizer = _load(path, choices)
    sizes = model.config.get_text_config()
    most = int(getattr(sizes, "max_position_embeddings", None) or _CONTEXT)
    config: dict[str, Any] = {
        "replace_with_kernel_inject": True,
        "dtype": choices.quantize or floats,
        "max_out_tokens": most,
        "cache_tokens": choices.cache_tokens or max(most, _CACHE),
        "tensor_parallel": {"tp_size": choices.tp},
    }
    if choices.checkpoint is not None:
        config |= {"checkpoint": str(choices.checkpoint.resolve()), "set_empty_params": True}
    engine = init_inference(model, config)
    generator = engine.generator
    # What the model, its program and the cache can all serve.
    most = min(most, generator.max_positions or most, generator.blocks * BLOCK)
    link: Link = (
        (lambda commands: comm.all_gather_json(commands)[0])
        if ranks > 1
        else (lambda commands: commands)
    )
    return Served(name or name_of(path), generator, Tokens(tokenizer, sizes.vocab_size), most, link)


def name_of(path: Path) -> str:
    """The last part of the path as it was given; of a file without what is behind its last dot."""
    whole = Path(os.path.abspath(path))  # links stay: what they point to is often a hash
    return whole.stem if whole.is_file() else whole.name


def _load(path: Path, choices: Choices) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]

    place, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    # Nothing is downloaded, and no code of the folder runs.
    only: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **only)
        if choices.checkpoint is None:
            # Shapes that differ are let through here, so that they can be named.
            seen = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place, use_safetensors=True, dtype="auto", **seen, **only
            )
            model, found = loaded
            _all_there(path, found)
            return model, tokenizer
        config = AutoConfig.from_pretrained(place, **only)
        # The checkpoint has the values, so MODEL's are never read.
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), tokenizer  # type: ignore[no-untyped-call]
    except CommandError:
        raise
    except Exception as error:  # a folder may hold anything, and each format has errors of its own
        # Transformers advises it, and this command does not offer it.
        if "trust_remote_code" in str(error):
            raise CommandError(
                f"{path} needs code from its folder, which `dscore serve` does not run"
            ) from None
        raise CommandError(
            f"{path} cannot be loaded by transformers: {type(error).__name__}: {error}"
        ) from error


def _all_there(path: Path, found: dict[str, Any]) -> None:
    """Refuse a model some of whose weights are not in its files: transformers fills them with
    random numbers.
    """
    for kind, what in (
        ("missing_keys", "are missing"),
        ("mismatched_keys", "have another shape"),
    ):
        names = sorted(
            str(key[0] if isinstance(key, tuple) else key) for key in found.get(kind) or ()
        )
        if names:
            some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise CommandError(
                f"{path}: {len(names)} of its weights {what}, so they would be random: {some}"
            )
