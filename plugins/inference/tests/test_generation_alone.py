"""Generation against a runnable whose cache holds the tokens themselves, so that a wrong block
changes the answer.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from ds_inference.generate.generator import Generator
from ds_inference.generate.requests import Finish, Handle, Output, Request, Result, SamplingParams
from ds_inference.generate.stopping import Detokenizer
from ds_inference_kit.program import Program
from ds_inference_kit.step import BLOCK, KVCache, Step
from torch import Tensor

from ds_core.errors import UsageError

WORDS = 32
PROGRAM = Program((), (), 0, torch.float32, layers=1, kv_heads=1, head_dim=1)
TABLE = torch.randn(997, WORDS, generator=torch.Generator().manual_seed(0)) * 2


class Echo:
    """Logits of a row are a line of TABLE that depends on every token before it, as the cache has
    them.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []

    def rebind(self) -> None:
        """Nothing."""

    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        assert cache is not None and step.blocks is not None
        lines = []
        starts = step.starts.tolist()
        lengths = step.lengths.tolist()
        self.rows.append(starts[-1])
        for n, length in enumerate(lengths):
            at = torch.arange(length)
            first = length - (starts[n + 1] - starts[n])
            assert step.positions[starts[n] : starts[n + 1]].tolist() == list(range(first, length))
            blocks = step.blocks[n][at // BLOCK].long()
            places = at % BLOCK
            cache.keys[0, blocks[first:], 0, places[first:], 0] = step.tokens[
                starts[n] : starts[n + 1]
            ].float()
            kept = cache.keys[0, blocks, 0, places, 0].long()
            assert (kept >= 0).all() and (kept < WORDS).all()
            weights = torch.arange(1, length + 1) * 31 + 7
            lines += ((kept + 1) * weights).cumsum(0)[first:].remainder(997).tolist()
        logits = TABLE[lines]
        return logits if step.wanted is None else logits[step.wanted]


def generator(blocks: int = 64, max_rows: int = 64, **options: object) -> Generator:
    made = Generator(
        Echo(),
        program=PROGRAM,
        max_positions=400,
        cache_tokens=blocks * BLOCK,
        max_rows=max_rows,
        **options,
    )  # type: ignore[arg-type]
    made.cache.keys.fill_(torch.nan)
    return made


def alone(prompt: list[int], params: SamplingParams, **options: object) -> list[Result]:
    return generator(**options).generate([prompt], params)[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    return Random(f"{seed}/{length}").choices(range(WORDS), k=length)


def test_a_prompt_in_parts_and_a_batch_equal_one_at_a_time() -> None:
    params = SamplingParams(max_new_tokens=70)
    prompts = [prompt(n) for n in (1, 5, BLOCK, 150, 31)]
    batch = generator(max_rows=40).generate(prompts, params)
    for given, found in zip(prompts, batch, strict=True):
        assert found[0].tokens == alone(given, params, max_rows=400)[0].tokens
        assert found[0].finished is Finish.LENGTH and len(found[0].tokens) == 70


def test_running_sequences_decode_while_a_long_prompt_is_computed() -> None:
    made = generator(max_rows=32)
    short = made.submit(Request(prompt(3), SamplingParams(max_new_tokens=300)))
    made.step()
    long = made.submit(Request(prompt(200), SamplingParams(max_new_tokens=1)))
    steps = 0
    while not long.done:
        before = len(short.results[0].tokens)
        made.step()
        steps += 1
        assert len(short.results[0].tokens) == before + 1
    assert steps == 25  # 200 rows, a quarter of 32 at a time


def requests(random: Random, count: int) -> list[Request]:
    made = []
    for number in range(count):
        many, beams = random.choice([(1, 1), (1, 1), (3, 1), (2, 3)])
        warm = random.choice([0.0, 0.0, 1.0])
        params = SamplingParams(
            max_new_tokens=random.randint(1, 120),
            temperature=warm,
            top_k=random.choice([0, 5]),
            num_beams=beams,
            num_return_sequences=many,
            seed=number,
            stop_token_ids=random.choice([(), (), (7,)]),
            repetition_penalty=random.choice([1.0, 1.3]),
        )
        made.append(Request(prompt(random.randint(1, 120), number), params))
    return made


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("seed", range(2))
def test_a_cache_that_is_too_small_changes_no_answer_and_leaks_nothing(seed: int) -> None:
    random = Random(seed)
    made = generator(
        blocks=random.choice([10, 13]), max_rows=random.choice([8, 30, 100]), max_sequences=8
    )
    waiting = requests(random, 18)
    opened = []
    cancelled = set[Handle]()
    while waiting or made.busy:
        while waiting and random.random() < 0.6:
            try:
                opened.append(made.submit(waiting.pop()))
            except UsageError as error:
                assert "raise cache_tokens" in str(error)
        made.step()
        if opened and random.random() < 0.02:
            chosen = random.choice(opened)
            if not chosen.done:
                made.cancel(chosen)
                cancelled.add(chosen)
    assert made.blocks_used == made.waiting == made.running == 0
    assert made.preemptions > 0 and len(opened) > 10 and cancelled
    for handle in opened:
        assert handle.done and handle.error is None
        if handle not in cancelled:
            expected = alone(list(handle.request.prompt), handle.request.params)
            assert [r.tokens for r in handle.results] == [r.tokens for r in expected]
            assert [r.finished for r in handle.results] == [r.finished for r in expected]


def test_what_can_never_fit_is_refused_with_the_setting_that_is_too_small() -> None:
    made = generator(blocks=4, max_sequences=4, max_waiting=1)
    with pytest.raises(UsageError, match="raise cache_tokens"):
        made.submit(Request(prompt(100), SamplingParams(max_new_tokens=40)))
    with pytest.raises(UsageError, match="400 positions"):
        made.submit(Request(prompt(390), SamplingParams(max_new_tokens=40)))
    with pytest.raises(UsageError, match="max_sequences=4"):
        made.submit(Request(prompt(3), SamplingParams(num_beams=5)))
    with pytest.raises(UsageError, match="between 0 and 10"):
        generator(vocab=10).submit(Request([10]))
    made.submit(Request(prompt(3)))
    assert made.full
    with pytest.raises(UsageError, match="max_waiting=1"):
        made.submit(Request(prompt(3)))
    # Three whole blocks of the prompt are shared, and three of the other seven belong to each.
    assert (
        len(alone(prompt(100), SamplingParams(num_return_sequences=2), blocks=10)[1].tokens)
        == 6 * BLOCK + 1 - 100
    )


def test_the_prompt_is_computed_once_for_several_sequences() -> None:
    made = generator(max_rows=200)
    params = SamplingParams(max_new_tokens=4, num_return_sequences=3, temperature=1.0, seed=5)
    results = made.generate([prompt(100)], params)[0]
    assert made._runnable.rows == [100, 3, 3, 3]  # type: ignore[attr-defined]
    assert len({tuple(r.tokens) for r in results}) == 3
    # The first of three and one alone draw the same numbers.
    assert (
        results[0].tokens
        == alone(prompt(100), SamplingParams(max_new_tokens=4, temperature=1.0, seed=5))[0].tokens
    )


def test_a_failing_request_ends_alone() -> None:
    def bad(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 6:
            raise RuntimeError("no more")
        return scores

    fine = SamplingParams(max_new_tokens=9)
    good = [Request(prompt(n), fine, id=n) for n in (4, 40)]
    failing = [
        Request(prompt(4), SamplingParams(logits_processors=(bad,))),
        Request(prompt(4), SamplingParams(logits_processors=(bad,), num_beams=2)),
        Request(
            prompt(4), SamplingParams(logits_processors=(lambda ids, scores: scores * torch.nan,))
        ),
        Request(prompt(4), SamplingParams(stopping=(lambda tokens: 1 // 0 > 0,))),
        Request([]),
    ]
    made = generator()
    outputs = list(made.serve(iter([good[0], *failing, good[1]])))
    ended = {output.handle.request: output.handle for output in outputs}
    assert len(outputs) == 7 and made.blocks_used == 0
    for request in good:
        assert ended[request].results[0].tokens == alone(list(request.prompt), fine)[0].tokens
    errors = [ended[request].error for request in failing]
    assert [type(error) for error in errors] == [
        RuntimeError,
        RuntimeError,
        UsageError,
        ZeroDivisionError,
        UsageError,
    ]
    with pytest.raises(RuntimeError, match="no more"):
        made.generate([prompt(4)], SamplingParams(logits_processors=(bad,)))
    assert not made.busy


def test_streams_and_cancelling() -> None:
    made = generator(decode=lambda tokens: " ".join(map(str, tokens)))
    params = SamplingParams(max_new_tokens=6, logprobs=2)
    tokens = [output.token for output in made.stream(prompt(5), params)]
    seen: list[Output] = []
    result = made.generate([prompt(5)], params, stream=seen.append)[0][0]
    assert tokens == result.tokens == [output.token for output in seen]
    assert result.text == " ".join(map(str, result.tokens))
    assert [output.logprob for output in seen] == result.logprobs
    assert all(
        top[0][0] == token and top[0][1] == chance
        for token, chance, top in zip(result.tokens, result.logprobs, result.top, strict=True)
    )
    broken = made.stream(prompt(5), params)
    next(broken)
    broken.close()
    assert not made.busy and made.blocks_used == 0
    waits = made.submit(Request(prompt(5)))
    made.cancel(waits)
    assert waits.done and waits.results[0].finished is Finish.CANCELLED and not made.busy


def test_several_callers_share_a_generator_in_any_mode_of_torch() -> None:
    made = generator()
    params = SamplingParams(max_new_tokens=9, num_beams=3)
    with torch.inference_mode():
        mine = made.submit(Request(prompt(40), params))
        made.step()
    others = made.generate([prompt(50), prompt(7)], params)
    found = []
    while made.busy:
        found += made.step()
    assert mine.done and {output.handle for output in found} == {mine}
    for length, results in zip((40, 50, 7), (mine.results, *others), strict=True):
        assert results[0].tokens == alone(prompt(length), params)[0].tokens


def test_stop_strings_across_tokens_and_characters_of_several_tokens() -> None:
    text = "the cat – sat".encode()
    tokens = list(text)

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    reads = Detokenizer(decode)
    pieces = [reads.push(token) for token in tokens]
    assert "".join(pieces) == text.decode() and "–" in pieces

    letters = "abcdefghijklmnopqrstuvwxyz .,-!?"

    def spell(ids: list[int]) -> str:
        return "".join(letters[i] for i in ids)

    whole = alone(prompt(5), SamplingParams(max_new_tokens=30), decode=spell)[0]
    assert whole.text is not None
    stop = whole.text[11:14]
    first = whole.text.index(stop)
    found = alone(
        prompt(5), SamplingParams(max_new_tokens=30, stop_strings=("##", stop)), decode=spell
    )[0]
    assert (found.text, found.finished) == (whole.text[:first], Finish.STOP)
    assert found.tokens == whole.tokens[: first + 3]
    beams = alone(prompt(5), SamplingParams(max_new_tokens=30, num_beams=2), decode=spell)[0]
    assert beams.text is not None
    params = SamplingParams(
        max_new_tokens=30, num_beams=2, stop_strings=(beams.text[7:9],), early_stopping=True
    )
    stopped = alone(prompt(5), params, decode=spell)[0]
    assert stopped.text is not None and params.stop_strings[0] not in stopped.text
    assert spell(stopped.tokens).startswith(stopped.text + params.stop_strings[0])


def test_lengths_and_stop_tokens() -> None:
    free = alone(prompt(5), SamplingParams(max_new_tokens=30))[0].tokens
    stop = free[4]
    params = SamplingParams(max_new_tokens=30)
    early = alone(prompt(5), params, eos=(stop,))[0]
    assert early.tokens == free[: free.index(stop) + 1] and early.finished is Finish.STOP
    assert (
        alone(prompt(5), SamplingParams(max_new_tokens=30, ignore_eos=True), eos=(stop,))[0].tokens
        == free
    )
    later = alone(prompt(5), SamplingParams(max_new_tokens=30, min_new_tokens=20), eos=(stop,))[
        0
    ].tokens
    assert stop not in later[:20] and len(later) > 20


@pytest.mark.parametrize("params", [
    {"temperature": -1.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"max_new_tokens": 0},
    {"num_beams": 2, "num_return_sequences": 3}, {"early_stopping": "now"}, {"stop_strings": ("",)},
])  # fmt: skip
def test_values_without_a_meaning_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(reversed(params))):
        SamplingParams(**params)  # type: ignore[arg-type]
