"""Answers equal transformers' own: tokens, scores, beams, and the distributions that are drawn
from.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ds_inference.families import lower
from ds_inference.generate import sampling
from ds_inference.generate.generator import Generator
from ds_inference.generate.hf import hf_generate, refusal
from ds_inference.generate.requests import SamplingParams
from ds_inference_kit.reference import load
from torch import Tensor

from ds_core.errors import UsageError

transformers = pytest.importorskip("transformers")
WORDS = 40


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=300,
        initializer_range=0.4,
        pad_token_id=0,
        eos_token_id=3,
        bos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config).eval()


def generator(model: Any) -> Generator:
    lowered = lower(model)
    assert lowered is not None
    return Generator(
        load(lowered.program),
        program=lowered.program,
        max_positions=300,
        cache_tokens=2048,
        vocab=WORDS,
        max_rows=16,
    )


def batch() -> dict[str, Tensor]:
    """Three prompts of 5, 9 and 7 tokens, padded on the left."""
    ids = torch.randint(4, WORDS, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((4, 0, 2)):
        ids[row, :pads] = 0
        mask[row, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generated_alike(model: Any, **keywords: Any) -> Any:
    """Compare with ``model.generate``; what ours returned."""
    given = {**batch(), "max_new_tokens": 24, **keywords}
    ours = hf_generate(generator(model), model, **given)
    theirs = model.generate(**given)
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
        return ours
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.logits or (), theirs.logits or (), strict=True):
        there = mine.ne(0).any(-1)  # zeros: the row has ended
        torch.testing.assert_close(mine[there], other[there], rtol=1e-4, atol=1e-4)
    return ours, theirs


@pytest.mark.fast_cases("keywords4", "keywords5", "keywords6", "keywords7")
@pytest.mark.parametrize("keywords", [
    {},
    {"eos_token_id": None},
    {"repetition_penalty": 1.4, "min_new_tokens": 10},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7},
    {"min_length": 14, "max_new_tokens": 10, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9]},
    {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, "max_new_tokens": 10},
    {"prefix_allowed_tokens_fn": lambda row, ids: [row + 10, row + 11, 20], "max_new_tokens": 6},
    {"forced_eos_token_id": 3, "max_new_tokens": 6},
])  # fmt: skip
def test_greedy(model: Any, keywords: dict[str, Any]) -> None:
    generated_alike(model, **keywords)


@pytest.mark.slow
def test_two_hundred_tokens(model: Any) -> None:
    assert generated_alike(model, max_new_tokens=200, eos_token_id=None).shape == (3, 209)


CASES = [
    pytest.param(early, penalty, marks=() if number in (0, 4, 8) else pytest.mark.slow)
    for number, (early, penalty) in enumerate(
        itertools.product([False, True, "never"], [1.0, 0.0, 2.0])
    )
]


@pytest.mark.fast_cases("never-2.0")
@pytest.mark.parametrize(("early", "penalty"), CASES)
def test_beams(model: Any, early: bool | str, penalty: float) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for beams, returned, new in ((4, 3, 24), (3, 1, 2)):
        ours, theirs = generated_alike(
            model,
            num_beams=beams,
            num_return_sequences=returned,
            early_stopping=early,
            length_penalty=penalty,
            max_new_tokens=new,
            eos_token_id=[3, 8],
            **wanted,
        )
        torch.testing.assert_close(
            ours.sequences_scores, theirs.sequences_scores, rtol=1e-5, atol=1e-5
        )
        assert torch.equal(ours.beam_indices, theirs.beam_indices)


def test_beams_with_processors(model: Any) -> None:
    generated_alike(
        model, num_beams=3, repetition_penalty=1.3, no_repeat_ngram_size=2, max_new_tokens=8
    )
    generated_alike(model, num_beams=3, repetition_penalty=1.3, min_new_tokens=12)


def test_criteria_streamers_and_what_the_module_serves_itself(model: Any) -> None:
    class Long(transformers.StoppingCriteria):
        def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return ids[:, -1] % 5 == 0

    class Kept(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    one = {name: value[1:2] for name, value in batch().items()}
    streamers = Kept(), Kept()
    keywords = {**one, "max_new_tokens": 24, "stopping_criteria": [Long()]}
    ours = hf_generate(generator(model), model, streamer=streamers[0], **keywords)
    theirs = model.generate(streamer=streamers[1], **keywords)
    assert torch.equal(ours, theirs) and streamers[0].seen == streamers[1].seen == [
        *theirs[0].tolist(),
        -1,
    ]
    with pytest.raises(UsageError, match="one prompt"):
        hf_generate(generator(model), model, streamer=Kept(), max_new_tokens=4, **batch())
    assert refusal(model, batch()) is None
    assert refusal(model, {"assistant_model": model}) == "the keyword assistant_model"
    assert refusal(model, {"output_attentions": True}) == "the setting output_attentions"
    generated_alike(model, return_dict_in_generate=True, output_hidden_states=True)


def test_draws_repeat_by_seed_and_stay_inside_the_filters(model: Any) -> None:
    keywords = {
        **batch(),
        "max_new_tokens": 24,
        "do_sample": True,
        "top_k": 4,
        "top_p": 0.9,
        "temperature": 1.5,
    }
    keywords |= {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2}
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(hf_generate(generator(model), model, **keywords))
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert len({tuple(row.tolist()) for row in runs[0].sequences}) == 6
    assert all(
        1 <= line.isfinite().sum() <= 4
        for score in runs[0].scores
        for line in score
        if line.ne(0).any()
    )
    beams = hf_generate(generator(model), model, **{**keywords, "num_beams": 3})
    assert beams.sequences.shape[0] == 6


@pytest.mark.parametrize("many", [12, 3000])
def test_distributions_equal_those_of_the_warpers(many: int) -> None:
    scores = torch.randn(6, many, generator=torch.Generator().manual_seed(0)) * 3
    scores[1] = scores[1].round()  # equal scores at the k-th place
    scores[2] /= 100  # flat: the nucleus is nearly everything
    process = transformers.generation.logits_process
    for warm, k, p, least in itertools.product((0.7, 1.0), (0, 1, 5), (0.2, 0.9, 1.0), (0.0, 0.1)):
        params = SamplingParams(temperature=warm, top_k=k, top_p=p, min_p=least)
        expected = process.TemperatureLogitsWarper(warm)(None, scores)
        expected = process.TopKLogitsWarper(k)(None, expected) if k else expected
        expected = process.TopPLogitsWarper(p)(None, expected) if p < 1 else expected
        expected = process.MinPLogitsWarper(least)(None, expected) if least else expected
        other = SamplingParams(temperature=1.0, top_p=0.5)  # another row's filters change nothing
        filters = sampling.Filters.of([params, params, params, other, params, params])
        weights, ids, complete = sampling.filter_scores(scores, filters, 16)
        if not complete.all():
            assert p == 1 or not complete[2] or many == 12
            weights, ids, _ = sampling.filter_scores(scores, filters, many)
        weights = torch.zeros(scores.shape, dtype=torch.float64).scatter(1, ids, weights)
        chances = (weights / weights.sum(-1, keepdim=True)).float()
        expected = torch.softmax(expected, -1)
        rows = [0, 2, 4, 5]
        torch.testing.assert_close(chances[rows], expected[rows], rtol=1e-4, atol=1e-7)
        # Which of equal scores stand at the end of a nucleus is not defined.
        torch.testing.assert_close(
            chances[1].sort()[0], expected[1].sort()[0], rtol=1e-4, atol=1e-7
        )


def test_a_number_points_at_the_token_whose_share_it_falls_into() -> None:
    shares = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0], dtype=torch.float64)
    ends = {0.0: 1, 0.374: 1, 0.376: 3, 0.499: 3, 0.501: 4, 1 - 2.0**-53: 4}
    for number, token in ends.items():
        point = torch.tensor([number], dtype=torch.float64)
        assert sampling.pick(shares[None], point).tolist() == [token]
        for width in (6, 70, 96):  # also where the share lies in another part of the row
            row = torch.cat([torch.full((width - 6,), -torch.inf), shares.log().float()])[None]
            assert sampling.draw(
                row, sampling.Filters.of([SamplingParams(temperature=1)]), [number]
            ).tolist() == [token + width - 6]


def test_every_token_is_drawn_as_often_as_it_is_probable() -> None:
    """Points at even distances: each token gets its share of them, up to one point."""
    many = 4000
    points = [(number + 0.5) / many for number in range(many)]
    row = torch.randn(1, 77, generator=torch.Generator().manual_seed(1)).expand(many, -1)
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40),
    ):
        found = sampling.draw(row, sampling.Filters.of([params] * many), points).bincount(
            minlength=77
        )
        expected = torch.softmax(sampling.mask_excluded(row[0], params).double(), -1) * many
        assert ((found - expected).abs() <= 1.001).all()


def test_penalties() -> None:
    row = torch.tensor([1.0, -1.0, 2.0, 0.0, 3.0])
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, min_new_tokens=4
    )
    found = sampling.process(row, params, [0, 1, 2, 2, 4], 2, (3,))
    assert found.tolist() == [0.5, -2.0, 1.0 - 1.0, -torch.inf, 1.5 - 0.75]
