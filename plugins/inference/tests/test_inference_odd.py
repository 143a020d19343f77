"""What callers do beside the usual: odd inputs, two engines, weights that change under an engine,
its end.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_inference import InferenceEngine, init_inference

sys.path.insert(0, str(Path(__file__).parent))

from inference_models import ids, make

from ds_core.errors import CheckpointError, UsageError

GREEDY = {"do_sample": False, "max_new_tokens": 4}


def program(kind: str = "llama", dtype: str = "fp32", **more: Any) -> InferenceEngine:
    engine = init_inference(make(kind), dtype=dtype, replace_with_kernel_inject=True, **more)
    assert engine._made.runnable is not None
    return engine


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (torch.zeros(1, 0, dtype=torch.long), {}),
            r"of shape \(1, 0\), not whole numbers .* at least one token",
        ),
        ((torch.zeros(0, 4, dtype=torch.long), {}), r"of shape \(0, 4\)"),
        ((torch.tensor([3, 4, 5]), {}), r"of shape \(3,\), not whole numbers \[batch, length\]"),
        ((torch.tensor([[3.0, 4.0]]), {}), r"prompts are torch.float32"),
        (([3, 4, 5], {}), r"prompts are a list, not a tensor .* generate\(\*\*tokenizer"),
        (
            (ids(2, 5), {"attention_mask": torch.ones(2, 4)}),
            r"attention_mask of shape \(2, 4\), and prompts of .*2, 5",
        ),
        ((torch.tensor([[3, 400]]), {}), "between 0 and 66"),
        ((ids(1, 70), {}), "more than 64 positions .*max_out_tokens"),
        ((ids(1, 20), {"max_new_tokens": 100}), "more than 64 positions .*max_out_tokens"),
    ],
)
def test_what_are_no_prompts(given: tuple[Any, dict[str, Any]], said: str) -> None:
    inputs, more = given
    with pytest.raises(UsageError, match=said):
        program().generate(inputs, **GREEDY | more)


def test_a_model_that_does_not_generate() -> None:
    with pytest.raises(UsageError, match="BertForMaskedLM has no generate"):
        program("bert").generate(ids())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match="save_mp_checkpoint_path: .*file cannot be made: File exists"
    ):
        init_inference(make("llama"), dtype="fp32", save_mp_checkpoint_path=str(tmp_path / "file"))


def test_inputs_that_do_not_fit_each_other() -> None:
    """They never get to compiled code, which reads memory without looking."""
    engine = program()
    truth = make("llama")
    with pytest.raises(ValueError, match=r"\(1, 4, 23\) are not \[b, t, 24\]"):
        engine(inputs_embeds=torch.randn(1, 4, 23))
    embeds = truth.get_input_embeddings()(ids()).detach()
    with torch.no_grad():  # another dtype is converted
        torch.testing.assert_close(
            engine(inputs_embeds=embeds.double()).logits, truth(inputs_embeds=embeds).logits
        )
        wide = torch.ones(1, 9, dtype=torch.long)  # for both rows: the module says what that means
        torch.testing.assert_close(
            engine(input_ids=ids(), attention_mask=wide).logits,
            truth(input_ids=ids(), attention_mask=wide).logits,
        )
    with pytest.raises(Exception, match="size"):
        engine(input_ids=ids(2, 5), position_ids=torch.arange(4)[None])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_program_follows_the_modules_weights(dtype: str) -> None:
    """Other values in place, as load_state_dict writes them, and other memory.

    In bf16, copies of norms are in fp32.
    """
    engine = program(dtype=dtype)
    with torch.no_grad():
        for change in (lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data * 0.5)):
            before = engine(input_ids=ids()).logits
            for parameter in engine.module.parameters():
                change(parameter)
            expected = engine.module(input_ids=ids()).logits
            found = engine(input_ids=ids()).logits
            assert not torch.allclose(before, expected, rtol=0.1)
            torch.testing.assert_close(
                found, expected, rtol=1e-4 if dtype == "fp32" else 0.05, atol=0.05
            )
    new = engine.generate(ids(), **GREEDY)
    assert torch.equal(new, program_of(engine).generate(ids(), **GREEDY))


def program_of(engine: InferenceEngine) -> InferenceEngine:
    """A new engine of the same module."""
    dtype = next(engine.module.parameters()).dtype
    return init_inference(engine.module, dtype=dtype, replace_with_kernel_inject=True)


def test_two_engines_of_one_module() -> None:
    first = program()
    wanted = first.generate(ids(), **GREEDY)
    second = init_inference(first.module, dtype="fp32")  # without a program
    assert torch.equal(second.generate(ids(), **GREEDY), wanted)
    second.destroy()
    assert torch.equal(first.generate(ids(), **GREEDY), wanted)
    # converts the module
    third = init_inference(first.module, dtype="int8", replace_with_kernel_inject=True)
    for call in (first, first.generate):
        with pytest.raises(
            UsageError, match="was torch.float32 on cpu .* torch.bfloat16 on cpu now"
        ):
            call(ids())
    assert third.generate(ids(), **GREEDY).shape == wanted.shape


@pytest.mark.parametrize("inject", [False, True])
def test_destroy_leaves_the_module(inject: bool) -> None:
    engine = init_inference(make("llama"), dtype="fp32", replace_with_kernel_inject=inject)
    wanted = engine.generate(ids(), **GREEDY)
    for _ in range(2):
        engine.destroy()
        assert engine._made.runnable is None and engine._made.module is engine.module
        assert torch.equal(engine.generate(ids(), **GREEDY), wanted)
    again = init_inference(engine.module, dtype="fp32", replace_with_kernel_inject=inject)
    assert torch.equal(again.generate(ids(), **GREEDY), wanted)


def test_an_engine_stays_in_evaluation_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = make("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    engine = init_inference(model, dtype="fp32")
    assert not engine.training and not model.training
    caplog.set_level(logging.WARNING, "ds_inference")
    assert engine.train() is engine
    assert not engine.training and not model.training
    assert "use hybrid_engine" in caplog.text
    assert torch.equal(engine(input_ids=ids()).logits, engine(input_ids=ids()).logits)
