"""`generate` as transformers has it, by a `Generator`.

The keywords, the generation config, the processors and the criteria are prepared by the module's
own ``generate``; what it then would do in a loop over the module is done here by the scheduler, row
by row without padding. So every setting means what transformers says. What rows of a cache cannot
serve goes to the module itself.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.process import log_once
from ds_inference.generate.generator import Generator
from ds_inference.generate.requests import Output, Processor, Result, SamplingParams, Stopping

_logger = logging.getLogger(__name__)

_LEAST = (4, 56)
"""transformers' version from which ``generate(custom_generate=function)`` works."""
_KEYWORDS = frozenset(
    (
        "attention_mask",
        "generation_config",
        "input_ids",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stop_strings",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
        "trust_remote_code",
        "use_model_defaults",
    )
)
# Settings that only the module's own loop can serve, and which values of them ask for that.
_CONFIGURED: dict[str, Callable[[Any], bool]] = {
    "output_attentions": bool,
    "output_hidden_states": bool,
    "prompt_lookup_num_tokens": bool,
    "penalty_alpha": bool,
    "dola_layers": lambda value: value is not None,
    "constraints": bool,
    "force_words_ids": bool,
    "num_beam_groups": lambda value: (value or 1) > 1,
    "guidance_scale": lambda value: value not in (None, 1, 1.0),
    "watermarking_config": lambda value: value is not None,
    "cache_implementation": lambda value: value not in (None, "dynamic", "hybrid"),
}


def hf_generate(
    generator: Generator, module: nn.Module, inputs: Tensor | None = None, **keywords: Any
) -> Any:
    """What ``module.generate(inputs, **keywords)`` returns, by `generator`.

    Processors and criteria of the caller see one row at a time, padded as it was given.
    """
    reason = refusal(module, keywords)
    call: Any = module.generate
    if reason is not None:
        log_once(
            _logger,
            logging.WARNING,
            "generate: %s is served by the module itself, without the program",
            reason,
        )
        return call(inputs, **keywords)
    _check(
        inputs if inputs is not None else keywords.get("input_ids"), keywords.get("attention_mask")
    )
    keywords = _with_stop_strings(module, keywords)
    streamer = keywords.get("streamer")

    # transformers prepares everything and calls this in the place of its loop.
    def answer(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        return _Rows(input_ids, prepared).run(generator, streamer)

    return call(inputs, custom_generate=answer, **keywords)


def _check(tokens: Any, mask: Any) -> None:
    """UsageError for what are no prompts: transformers' own preparation takes all that looks like a
    tensor.
    """
    if tokens is None:
        return
    if not isinstance(tokens, Tensor):
        raise UsageError(
            f"prompts are a {type(tokens).__name__}, not a tensor [batch, length] of tokens; of a "
            "tokenizer's answer "
            "all is given: generate(**tokenizer(text, return_tensors='pt'))"
        )
    if tokens.dim() != 2 or not tokens.numel() or tokens.is_floating_point():
        raise UsageError(
            f"prompts are {tokens.dtype} of shape {tuple(tokens.shape)}, not whole numbers [batch, "
            "length] of at least "
            "one token each"
        )
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape != tokens.shape:
        raise UsageError(
            f"attention_mask of shape {tuple(mask.shape)}, and prompts of shape "
            f"{tuple(tokens.shape)}"
        )


@functools.cache
def _too_old() -> str | None:
    """transformers' version where its ``generate`` takes no loop of others; None where it does."""
    import transformers

    version: str = transformers.__version__
    return version if tuple(int(part) for part in version.split(".")[:2]) < _LEAST else None


def refusal(module: nn.Module, keywords: dict[str, Any]) -> str | None:
    """What in `keywords`, or in the module's generation config, only the module itself can serve;
    None: nothing.
    """
    if (version := _too_old()) is not None:
        return (
            f"transformers {version}, where {'.'.join(map(str, _LEAST))} is the least that "
            "hands "
            "its loop on,"
        )
    if getattr(module.config, "is_encoder_decoder", False):
        return "an encoder-decoder model"
    configs = [
        config
        for config in (keywords.get("generation_config"), module.generation_config)
        if config is not None
    ]
    # A keyword that is neither of ``generate`` nor a setting goes to the model's forward (pixel
    # values, ...), which a program has no register for.
    for name, value in keywords.items():
        if value is not None and name not in _KEYWORDS and not hasattr(configs[-1], name):
            return f"the keyword {name}"
    for name, needs in _CONFIGURED.items():
        # As transformers reads a setting: from the call, then from its config, then from the
        # model's.
        values = [keywords.get(name), *(getattr(config, name, None) for config in configs)]
        if needs(next((value for value in values if value is not None), None)):
            return f"the setting {name}"
    return None


def _with_stop_strings(module: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """`keywords` with stop strings as a criterion: ``generate`` does not hand the tokenizer on to a
    loop of others.
    """
    config = keywords.get("generation_config") or module.generation_config
    strings = keywords.get("stop_strings") or getattr(config, "stop_strings", None)
    tokenizer = keywords.get("tokenizer")
    if not strings or tokenizer is None:
        return keywords
    from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

    rest = {
        name: value for name, value in keywords.items() if name not in ("stop_strings", "tokenizer")
    }
    # Not the caller's config, which would lose its strings for the next call.
    rest["generation_config"] = copy.deepcopy(config)
    rest["generation_config"].stop_strings = None
    given = rest.get("stopping_criteria") or ()
    rest["stopping_criteria"] = StoppingCriteriaList(
        [*given, StopStringCriteria(tokenizer, strings)]
    )
    return rest


class _Rows:
    """The rows that ``generate`` prepared, as requests, and their results as its return value."""

    def __init__(self, ids: Tensor, prepared: dict[str, Any]) -> None:
        self.config = prepared["generation_config"]
        self.processors = list(prepared["logits_processor"])
        self.criteria = list(prepared["stopping_criteria"])
        self.beams = self.config.num_beams or 1
        self.each = max(self.beams, self.config.num_return_sequences or 1)
        mask = prepared.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise UsageError(
                f"attention_mask of {mask.dim()} dimensions: generate takes [batch, length]"
            )
        self.ids = ids
        # transformers has repeated each prompt for its beams or answers; the generator computes it
        # once.
        self.given = ids[:: self.each].cpu()
        keep = torch.ones_like(self.given) if mask is None else mask[:: self.each].cpu()
        self.prompts = [row[real != 0].tolist() for row, real in zip(self.given, keep, strict=True)]
        eos = self.config._eos_token_tensor
        self.stops: tuple[int, ...] = () if eos is None else tuple(eos.flatten().tolist())

    def run(self, generator: Generator, streamer: Any) -> Any:
        """Generate, and put the results together."""
        if streamer is not None and (len(self.prompts) > 1 or self.each > 1):
            raise UsageError(
                "streamer: one prompt and one sequence at a time; Generator.stream has no such "
                "limit"
            )

        # transformers' streamers expect a tensor on the CPU for each token.
        def put(output: Output) -> None:
            if output.token is not None:
                streamer.put(torch.tensor([output.token]))

        params = [self._params(row) for row in range(len(self.prompts))]
        results = generator.generate(self.prompts, params, None if streamer is None else put)
        if streamer is not None:
            streamer.end()
        return self._make_output(results)

    # Requests.

    def _params(self, row: int) -> SamplingParams:
        config = self.config
        new, stops, stopping = self._criteria(row)
        # Fields are computed for all rows at once; a processor row by row. So what has a field uses
        # it.
        fields = _translate(
            self.processors, self.given.shape[1], 1 + len(self.stops) if self.beams > 1 else 1
        )
        if fields is None:
            fields = {"logits_processors": (self._processor(row),)}
        if config.do_sample:
            fields.setdefault("temperature", 1.0)
        wanted = bool(config.return_dict_in_generate)
        if self.beams > 1:
            early = config.early_stopping
            fields |= {
                "length_penalty": config.length_penalty,
                "early_stopping": False if early is None else early,
            }
        return SamplingParams(
            max_new_tokens=new,
            num_beams=self.beams,
            num_return_sequences=config.num_return_sequences or 1,
            stop_token_ids=stops,
            # The stops are those of the prepared criteria.
            ignore_eos=True,
            stopping=stopping,
            keep_scores=wanted and bool(config.output_scores),
            keep_logits=wanted and bool(config.output_logits),
            **fields,
        )

    def _criteria(self, row: int) -> tuple[int, tuple[int, ...], tuple[Stopping, ...]]:
        """(the most new tokens, tokens that end a sequence, other criteria) of `row`."""
        from transformers.generation import stopping_criteria as kinds

        lengths = []
        stops = set(self.stops)
        others = []
        for criterion in self.criteria:
            if type(criterion) is kinds.MaxLengthCriteria:
                # transformers counts from the padded length.
                lengths.append(criterion.max_length - self.given.shape[1])
            elif type(criterion) is kinds.EosTokenCriteria:
                stops |= set(criterion.eos_token_id.flatten().tolist())
            else:
                others.append(self._criterion(row, criterion))
        return min(lengths), tuple(sorted(stops)), tuple(others)

    def _pad(self, row: int, tokens: Sequence[int] | Tensor) -> Tensor:
        """[1, length]: the row as it was given, and what `tokens` has behind the prompt."""
        new = torch.as_tensor(tokens, device=self.ids.device)[len(self.prompts[row]) :]
        return torch.cat([self.given[row].to(self.ids.device), new])[None]

    def _criterion(self, row: int, criterion: Any) -> Stopping:
        return lambda tokens: bool(torch.as_tensor(criterion(self._pad(row, tokens), None)).all())

    def _processor(self, row: int) -> Processor:
        """All processors, for `row` alone."""
        from transformers.generation import logits_process as kinds

        mine: list[Any] = []
        for processor in self.processors:
            # Processors that keep data of the whole batch are created again for this row.
            if type(processor) is kinds.RepetitionPenaltyLogitsProcessor:
                skipped = processor.prompt_ignore_length
                skipped = int(skipped[row * self.each]) if isinstance(skipped, Tensor) else skipped
                mine.append(kinds.RepetitionPenaltyLogitsProcessor(processor.penalty, skipped))
            elif type(processor) is kinds.PrefixConstrainedLogitsProcessor:
                mine.append(kinds.PrefixConstrainedLogitsProcessor(_allowed_by(processor, row), 1))
            else:
                mine.append(processor)

        def process(ids: Tensor, scores: Tensor) -> Tensor:
            padded = self._pad(row, ids[0])
            for processor in mine:
                scores = processor(padded, scores)
            return scores

        return process

    # Results.

    def _make_output(self, results: list[list[Result]]) -> Any:
        flat = [result for answers in results for result in answers]
        longest = max(len(result.tokens) for result in flat)
        sequences = torch.full(
            (len(flat), self.given.shape[1] + longest), self._fill(), dtype=torch.int64
        )
        # The prompt as it was given, the answer, then padding.
        for place, result in enumerate(flat):
            sequences[place, : self.given.shape[1]] = self.given[place // len(results[0])]
            sequences[place, self.given.shape[1] :][: len(result.tokens)] = torch.tensor(
                result.tokens
            )
        sequences = sequences.to(self.ids.device)
        if not self.config.return_dict_in_generate:
            return sequences
        from transformers import generation

        # transformers' own classes, so that callers can read them by name and by place.
        kinds: Any = generation
        scores = (
            _per_step([r.scores for r in flat if r.scores]) if self.config.output_scores else None
        )
        logits = (
            _per_step([r.logits for r in flat if r.logits]) if self.config.output_logits else None
        )
        if self.beams == 1:
            return kinds.GenerateDecoderOnlyOutput(
                sequences=sequences, scores=scores, logits=logits
            )
        summed = torch.tensor([result.score for result in flat], device=sequences.device)
        return kinds.GenerateBeamDecoderOnlyOutput(
            sequences=sequences,
            sequences_scores=summed if self.config.output_scores else None,
            scores=scores,
            logits=logits,
            beam_indices=self._beam_indices(results, longest),
        )

    def _fill(self) -> int:
        """What stands behind the end of a sequence."""
        pad = self.config._pad_token_tensor
        known = None if pad is None else int(pad.flatten()[0])
        if self.beams > 1:
            # As transformers' beam search does: -1 where there is no stop token either.
            return (known or self.stops[0]) if self.stops else -1
        return 0 if known is None else known

    def _beam_indices(self, results: list[list[Result]], longest: int) -> Tensor:
        rows = []
        for group, answers in enumerate(results):
            for result in answers:
                path = [beam + group * self.beams for beam in result.beam_indices]
                rows.append(path + [-1] * (longest - len(path)))
        return torch.tensor(rows, dtype=torch.int32, device=self.ids.device)


def _translate(processors: list[Any], length: int, keep: int) -> dict[str, Any] | None:
    """`processors` as fields of `SamplingParams`; None: there is one without a field, or they are
    in another order.

    length: of the prompts with padding, from which transformers counts.
    keep: tokens that filters must leave.
    """
    from transformers.generation import logits_process as kinds

    # `SamplingParams` applies its fields in one order (`stage`): processors in another order mean
    # something else, and then are called as they are.
    fields: dict[str, Any] = {}
    stage = 0
    for processor in processors:
        kind = type(processor)
        if kind is kinds.RepetitionPenaltyLogitsProcessor and not isinstance(
            processor.prompt_ignore_length, int
        ):
            place = 1
            name = "repetition_penalty"
            value = processor.penalty
        elif kind is kinds.MinNewTokensLengthLogitsProcessor:
            place = 2
            name = "min_new_tokens"
            value = processor.min_new_tokens
        elif kind is kinds.MinLengthLogitsProcessor:
            place = 2
            name = "min_new_tokens"
            value = max(0, processor.min_length - length)
        elif kind is kinds.TemperatureLogitsWarper:
            place = 3
            name = "temperature"
            value = processor.temperature
        elif kind is kinds.TopKLogitsWarper:
            place = 4
            name = "top_k"
            value = processor.top_k
        elif kind is kinds.TopPLogitsWarper:
            place = 5
            name = "top_p"
            value = processor.top_p
        elif kind is kinds.MinPLogitsWarper:
            place = 6
            name = "min_p"
            value = processor.min_p
        else:
            return None
        # Both kinds of minimal length may be given; of any other kind two would be applied twice.
        if (
            place < stage
            or (place == stage != 2)
            or getattr(processor, "min_tokens_to_keep", keep) != keep
        ):
            return None
        stage = place
        fields[name] = max(value, fields.get(name, 0))
    return fields


def _allowed_by(processor: Any, row: int) -> Callable[[int, Tensor], list[int]]:
    """The function of a prefix constraint, for `row` of the batch."""
    return lambda _, ids: list(processor._prefix_allowed_tokens_fn(row, ids))


def _per_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """One tensor per step, of all rows; zeros for those that had ended."""
    steps = []
    for step in range(max(len(row) for row in rows)):
        parts = [row[step] if step < len(row) else torch.zeros_like(row[0]) for row in rows]
        steps.append(torch.cat([part if part.dim() == 2 else part[None] for part in parts]))
    return tuple(steps)
