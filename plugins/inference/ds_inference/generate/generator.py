"""Generation: requests in, tokens out, all of them in the same steps (continuous batching)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import torch
from ds_inference_kit.program import Program, Runnable
from ds_inference_kit.step import BLOCK, KVCache
from torch import Tensor

from ds_core.errors import UsageError
from ds_inference.generate import scheduler as plans
from ds_inference.generate.beams import Beams
from ds_inference.generate.blocks import Blocks
from ds_inference.generate.choosing import Choice
from ds_inference.generate.limits import Limits
from ds_inference.generate.requests import Finish, Handle, Output, Request, Result, SamplingParams
from ds_inference.generate.sampling import Filters
from ds_inference.generate.stopping import Decode, StopStrings, beam_ends


def _drawn_seed() -> int:
    return int(torch.randint(2**62, ()))


class Generator:
    """Answers requests by running `runnable` step by step, over a paged cache. For one thread.

    The model:

    runnable: a loaded program, or anything that is called as one.
    program: says what cache `runnable` needs.
    max_positions: of a sequence; None: any number.

    vocab: tokens, where the logits are wider; None: as wide as they are.
    eos: tokens that end a sequence.
    device: where the cache and the rows of a step are.

    The cache, and how much is done at a time:

    cache_tokens: of all running sequences together, where no `cache` is given.
    cache: instead of a new one.

    max_rows: of one step; longer prompts need several.
    max_sequences: that decode at the same time.
    max_waiting: requests in the queue; None: any number.

    What the caller has:

    decode: of the tokenizer, for text and stop strings.
    seeds: draws a seed for a request that has none; on several ranks it must return the same on
        all.
    most_key: what an error names as the key that limits the length of a sequence.
    """

    def __init__(
        self,
        runnable: Runnable,
        *,
        program: Program,
        max_positions: int | None,
        cache_tokens: int,
        vocab: int | None = None,
        eos: Iterable[int] = (),
        device: torch.device | str = "cpu",
        max_rows: int = 512,
        max_sequences: int = 64,
        max_waiting: int | None = None,
        decode: Decode | None = None,
        seeds: Callable[[], int] = _drawn_seed,
        cache: KVCache | None = None,
        most_key: str = "max_out_tokens of init_inference",
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_sequences", max_sequences)):
            if value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        blocks = cache_tokens // BLOCK if cache is None else cache.blocks
        if not blocks:
            raise UsageError(f"cache_tokens={cache_tokens}: must be at least {BLOCK}, one block")
        shape = program.layers, blocks, program.kv_heads, program.head_dim
        # An inference tensor could not be written in place by a step outside of inference mode.
        with torch.inference_mode(False):
            self.cache = KVCache.make(*shape, program.dtype, device) if cache is None else cache
        # Without a limit of the model's the cache is the limit; the last token of a sequence is
        # never written to it.
        self.max_positions = blocks * BLOCK + 1 if max_positions is None else max_positions
        self._most_key = most_key
        self.vocab = vocab
        self.eos = frozenset(eos)
        self.decode = decode
        self.max_waiting = max_waiting
        # Each decoding sequence has a row in every step.
        self.max_sequences = min(max_sequences, max_rows)
        self.prompt_tokens = self.new_tokens = 0
        self._runnable = runnable
        self._seeds = seeds
        self._device = device
        self._blocks = Blocks(blocks)
        self._scheduler = plans.Scheduler(self._blocks, max_rows, self.max_sequences, device)
        self._groups: dict[Handle, plans.Group] = {}
        # Outputs that `step` has not returned yet.
        self._ended: list[Output] = []
        # What the last step has chosen, still on the device: the next step reads it there.
        self._tokens: Tensor | None = None
        # How the sequences of a plan choose. A plan that is repeated (decoding) chooses in the same
        # way, so this is made once.
        self._chosen: tuple[plans.Plan, Choice] | None = None

    # What is going on.

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._groups or self._ended)

    @property
    def waiting(self) -> int:
        """Requests in the queue (also those that lost their blocks)."""
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        """Requests with blocks."""
        return len(self._scheduler.running)

    @property
    def full(self) -> bool:
        """Whether the queue takes no request now."""
        return self.max_waiting is not None and self.waiting >= self.max_waiting

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return self._blocks.total

    @property
    def blocks_used(self) -> int:
        """Blocks that sequences hold."""
        return self._blocks.total - self._blocks.free

    @property
    def preemptions(self) -> int:
        """How often a request gave its blocks back and had to be computed again."""
        return self._scheduler.preemptions

    # Requests.

    def submit(self, request: Request) -> Handle:
        """Queue `request`; an error at once if it can never be answered, or if the queue is
        full."""
        if self.full:
            raise UsageError(
                f"{self.waiting} requests wait already (max_waiting={self.max_waiting}); try again "
                "later"
            )
        params = request.params
        prompt = list(request.prompt)
        limits = Limits(
            self.vocab, self.max_positions, self.max_sequences, self.blocks, self._most_key
        )
        new = limits.new_tokens(prompt, params, decodes=self.decode is not None)
        # What cannot be a tensor is an error here, of this request; in a step it would be one of
        # all that run.
        Filters.of([params])
        handle = Handle(
            request,
            [] if params.num_beams > 1 else [Result() for _ in range(params.num_return_sequences)],
        )
        # The request's own stop tokens count also where the model's are ignored.
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        seed = self._seeds() if params.seed is None else params.seed
        # One sequence computes the prompt; the others of the request are forked from it when it is
        # done (`_split`).
        group = plans.Group(handle, params, len(prompt), new, params.rows, stops, seed)
        group.sequences.append(plans.Sequence(group, prompt))
        if params.num_beams > 1:
            ends = beam_ends(params, len(prompt), self.decode)
            group.beams = Beams(
                params, len(prompt), new, stops, ends, _random(seed, 0), self._device
            )
        else:
            self._begin(group.sequences[0])
        self._groups[handle] = group
        self._scheduler.add(group)
        self.prompt_tokens += len(prompt)
        return handle

    def cancel(self, handle: Handle) -> None:
        """End `handle` now, wherever it is, and free its blocks; nothing if it has ended.

        No `Output` tells of it.
        """
        group = self._groups.get(handle)
        if group is not None:
            self._end(group, Finish.CANCELLED)

    def step(self) -> list[Output]:
        """Run one step; what it brought. An error of one request ends that request only."""
        # Whatever the caller's mode: tensors of this step are changed in later ones, which may be
        # in another mode.
        with torch.inference_mode(False), torch.no_grad():
            self._step()
        outputs, self._ended = self._ended, []
        return outputs

    def _step(self) -> None:
        # Choose the rows of this step. Where the same sequences go on, their tokens are copied on
        # the device, and no tensor is built.
        plan = self._scheduler.plan(self._tokens)
        self._tokens = None
        if plan is None:
            return
        try:
            # Shared blocks that are about to be written are copied first, as their other owners
            # keep the old values.
            self._copy(plan.copies)
            logits = self._runnable(plan.step, self.cache)
        # The rows are not in the cache, and were not counted as such; a tensor of the plan may be
        # half written, so it is not used again.
        except BaseException:
            self._scheduler.changed()
            raise
        self._scheduler.done(plan)
        if plan.chosen:
            self._advance(plan, logits if self.vocab is None else logits[:, : self.vocab])

    # Whole runs.

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        stream: Callable[[Output], None] | None = None,
    ) -> list[list[Result]]:
        """The results of each prompt.

        params: for all, or one each.
        stream: called with each output as it comes.
        """
        each = (
            list(params)
            if isinstance(params, Sequence)
            else [params or SamplingParams()] * len(prompts)
        )
        handles: list[Handle] = []
        requests = [Request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        for output in self._run(iter(requests), handles.append):
            if stream is not None:
                stream(output)
        return [handle.results for handle in handles]

    def stream(
        self, prompt: Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[Output]:
        """The outputs of one prompt as they come; closing the iterator cancels it."""
        return self._run(iter([Request(prompt, params or SamplingParams())]), lambda _: None)

    def serve(self, requests: Iterable[Request], tokens: bool = False) -> Iterator[Output]:
        """Answer `requests`, taken from the iterable as places become free; outputs as they come.

        tokens: every output; otherwise only the one that ends a request. A request that cannot be
        answered ends with `Finish.ERROR` and its handle's `error`; the others go on. Closing the
        iterator cancels what is under way.
        """
        return (output for output in self._run(iter(requests), None) if tokens or output.done)

    def _run(
        self, requests: Iterator[Request], opened: Callable[[Handle], None] | None
    ) -> Iterator[Output]:
        """Outputs of `requests` until all have ended.

        opened: told of each handle, and errors are raised.
        """
        mine: dict[Handle, None] = {}
        more = True
        try:
            # Requests are only taken from the iterable when they can start soon: an endless one
            # must not fill the queue.
            while more or mine:
                while more and not self.full and self.waiting < self.max_sequences:
                    request = next(requests, None)
                    if request is None:
                        more = False
                        break
                    handle = (
                        self.submit(request) if opened is not None else self._try_submit(request)
                    )
                    mine[handle] = None
                    if opened is not None:
                        opened(handle)
                for output in self.step():
                    if output.handle not in mine:
                        # its own caller gets it from the next step
                        self._ended.append(output)
                        continue
                    if output.handle.error is not None and opened is not None:
                        raise output.handle.error
                    yield output
                # Another caller may have cancelled some, for which there is no output.
                for handle in [handle for handle in mine if handle.done]:
                    del mine[handle]
        finally:
            for handle in mine:
                self.cancel(handle)

    def _try_submit(self, request: Request) -> Handle:
        """As `submit`, but a refused request has ended with an error."""
        try:
            return self.submit(request)
        except Exception as error:
            handle = Handle(request, [], done=True, error=error)
            self._ended.append(Output(handle, None, finished=Finish.ERROR, done=True))
            return handle

    # The inside of a step.

    def _begin(self, sequence: plans.Sequence) -> None:
        """Give `sequence` its result and its own generator."""
        params = sequence.group.params
        sequence.result = sequence.group.handle.results[sequence.index]
        sequence.random = _random(sequence.group.seed, sequence.index)
        if params.stop_strings and self.decode is not None:
            sequence.stops = StopStrings(params.stop_strings, self.decode)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        for arena in (self.cache.keys, self.cache.values) if copies else ():
            for old, new in copies:
                arena[:, new] = arena[:, old]

    def _advance(self, plan: plans.Plan, logits: Tensor) -> None:
        if self._chosen is None or self._chosen[0] is not plan:
            self._chosen = (plan, self._choice(plan, logits))
        choice = self._chosen[1]
        if choice.sequences:
            tokens, ids, errors = choice(logits)
            for place, (sequence, token) in enumerate(zip(choice.sequences, tokens, strict=True)):
                # The request has ended, so the token is dropped.
                if sequence.group.handle.done:
                    continue  # another sequence of it has failed in this step
                if place in errors:
                    self._fail(sequence.group, errors[place])
                else:
                    self._add(sequence, token)
            # In the order of the plan's sequences, which is the order of its rows if it is
            # repeated.
            self._tokens = ids
            self.new_tokens += len(tokens)

    def _choice(self, plan: plans.Plan, logits: Tensor) -> Choice:
        """How the sequences of `plan` choose; beams do it here."""
        sequences: list[plans.Sequence] = []
        rows: list[int] = []
        beams: dict[plans.Group, list[int]] = {}
        for row, sequence in enumerate(plan.chosen):
            group = sequence.group
            if group.beams is not None:
                beams.setdefault(group, []).append(row)
                continue
            if not group.split:  # the prompt is whole: the other sequences begin
                self._split(group)
                sequences += group.sequences
                rows += [row] * len(group.sequences)
            else:
                sequences.append(sequence)
                rows.append(row)
        # After the loop: a beam search reads the rows of all its beams together.
        for group, places in beams.items():
            self._advance_beams(group, logits[places])
        # Without an index the logits are read as they are, without a copy.
        same = rows == list(range(logits.shape[0]))
        return Choice(sequences, None if same else rows, self._device)

    def _split(self, group: plans.Group) -> None:
        first = group.sequences[0]
        for index in range(1, group.rows):
            sequence = self._scheduler.fork(first, index, group.prompt)
            group.sequences.append(sequence)
            self._begin(sequence)
        group.split = True
        # There are new sequences, so the plan of this step cannot be repeated.
        self._scheduler.changed()

    def _advance_beams(self, group: plans.Group, logits: Tensor) -> None:
        assert group.beams is not None
        self._scheduler.changed()
        old = group.sequences
        try:
            follow = group.beams.advance(logits, [sequence.tokens for sequence in old])
        except Exception as error:  # processors and criteria are the caller's code
            self._fail(group, error)
            return
        self.new_tokens += len(old)
        # The search is over: its answers are the results, without a token of their own.
        if follow is None:
            group.handle.results = group.beams.results()
            for index, result in enumerate(group.handle.results):
                if self.decode is not None:
                    text = self.decode(result.tokens)
                    ends = [
                        text.find(string) for string in group.params.stop_strings if string in text
                    ]
                    result.text = text[: min(ends, default=None)]
                last = index + 1 == len(group.handle.results)
                self._ended.append(
                    Output(group.handle, None, finished=result.finished, index=index, done=last)
                )
            self._end(group, None)
            return
        # Each next beam is a fork of the beam that it continues: two may come from one, and some
        # end here. Forks are made before the old beams give their blocks back, so that what is
        # shared stays.
        group.sequences = []
        for index, (beam, token) in enumerate(follow):
            parent = old[min(beam, len(old) - 1)]
            sequence = self._scheduler.fork(parent, index, len(parent.tokens))
            sequence.tokens.append(token)
            group.sequences.append(sequence)
        for sequence in old:
            self._scheduler.drop(sequence)
        group.split = True

    def _add(self, sequence: plans.Sequence, token: int) -> None:
        """Give `sequence` its next token."""
        result = sequence.result
        group = sequence.group
        assert result is not None
        sequence.tokens.append(token)
        result.tokens.append(token)
        try:
            finished = self._check_finished(sequence, result, token)
        except Exception as error:  # criteria and decoding are the caller's code
            self._fail(group, error)
            return
        # `Choice` has appended them before, if the request asks for log-probabilities.
        chance, top = (result.logprobs[-1], result.top[-1]) if result.logprobs else (None, ())
        if finished is not None:
            result.finished = finished
            if sequence.stops is None and self.decode is not None:
                result.text = self.decode(result.tokens)
            group.sequences.remove(sequence)
            # Its blocks are free for other sequences from the next step on.
            self._scheduler.drop(sequence)
            self._scheduler.changed()
            if not group.sequences:
                self._end(group, None)
        self._ended.append(
            Output(group.handle, token, chance, top, finished, sequence.index, group.handle.done)
        )

    def _check_finished(
        self, sequence: plans.Sequence, result: Result, token: int
    ) -> Finish | None:
        group = sequence.group
        stopped = token in group.stop_ids
        if sequence.stops is not None:
            # A stop token is no text, so it is not decoded; a stop string ends the text before
            # itself.
            if not stopped and sequence.stops.push(token):
                result.text = sequence.stops.text
                stopped = True
            # The end: what was held back as an incomplete character is shown as it is.
            elif stopped or len(result.tokens) == group.new:
                result.text = sequence.stops.finish()
        if stopped or any(stop(sequence.tokens) for stop in group.params.stopping):
            return Finish.STOP
        return Finish.LENGTH if len(result.tokens) == group.new else None

    def _fail(self, group: plans.Group, error: Exception) -> None:
        group.handle.error = error
        self._end(group, Finish.ERROR)
        self._ended.append(Output(group.handle, None, finished=Finish.ERROR, done=True))

    def _end(self, group: plans.Group, finished: Finish | None) -> None:
        """Forget `group`; finished: of its results that have not ended."""
        self._scheduler.remove(group)
        del self._groups[group.handle]
        group.handle.done = True
        for result in group.handle.results:
            result.finished = result.finished or finished


def _random(seed: int, index: int) -> Random:
    return Random(f"{seed}/{index}")
