"""``engine.evaluate``: a dataset through the model in eval mode, and metrics over all ranks.

[Note: rounds] A forward may be collective: ZeRO stage 3 gathers weights, experts exchange tokens. So
all ranks run equally many. Before each round every rank says how many batches it has. One that has
fewer than another runs a batch that it has seen before, or another rank's, and drops the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from ds_core import comm
from ds_core.engine import Engine, call_with_batch, eval_mode
from ds_core.errors import UsageError
from ds_core.nested import to_device
from ds_evaluation.data import Batch, batches_of, shared
from ds_evaluation.metrics import Metric, score_of, totals

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from ds_evaluation.metrics import Score

Forward = Callable[[Engine, Any], Any]
"""How a batch is run: ``(engine, batch) -> outputs``."""


def evaluate(
    engine: Engine,
    data: Dataset[Any] | Iterable[Any],
    metrics: Mapping[str, Metric],
    *,
    forward: Forward | None = None,
    prefix: str = "eval",
) -> dict[str, float]:
    """Metrics of the model over `data`, in eval mode and without gradients. Every rank calls it.

    The result is the same on all ranks, and the one that a single process gives: metrics are means
    over samples, not over batches or ranks. Monitors get it as ``eval/<name>``.

    data: a dataset, which is divided over the ranks so that each sample is used once; or a loader
        of this rank's batches. Ranks may have different numbers of batches, or none.
    metrics: name -> function ``(outputs, batch)``, which returns a tensor with one value per sample
        (or token), or the pair (sum, count). Or a torchmetrics object, alone or in a pair with a
        function ``(outputs, batch)`` that returns the arguments of its ``update``.
    forward: ``(engine, batch) -> outputs``; by default a mapping is given to the model as keywords,
        a tuple or list as arguments, as in `train_batch`.
    prefix: what comes before the names in monitors; "" leaves monitors out.

    Raises UsageError, also where ranks give different metrics.
    """
    with comm.together():
        if forward is not None and not engine.runner.manual:
            raise UsageError(
                f"evaluate(forward=...) is not possible: {engine.runner.manual_reason}"
            )
        scores = {name: score_of(name, metric, engine) for name, metric in metrics.items()}
        _check_names(list(scores))
        modes = eval_mode(engine.module)
        with engine.telemetry.evaluation() as seen, modes, torch.no_grad():
            has_outputs = False
            for rows in _rounds(engine, batches_of(data, engine.ctx), forward):
                has_outputs |= rows is not None
                for score in scores.values():
                    for outputs, batch in rows or ():
                        score.add(outputs, batch)
            found = _over_ranks(engine, scores, has_outputs)
            seen.update(found)
    if prefix:
        engine.log({f"{prefix}/{name}": value for name, value in found.items()})
    return found


def _check_names(names: list[str]) -> None:
    """Raise UsageError on all ranks unless all have the same metrics, in any order."""
    held = comm.all_gather_json(sorted(names))
    for rank, other in enumerate(held):
        if other != held[0]:
            raise UsageError(
                f"engine.evaluate: rank 0 has the metrics {', '.join(held[0]) or 'none'}, and rank "
                f"{rank} has {', '.join(other) or 'none'}; give all ranks the same"
            )


def _rounds(
    engine: Engine, batches: Iterator[Batch], forward: Forward | None
) -> Iterator[list[tuple[Any, Any]] | None]:
    """Of each round the outputs and batches to count; None where this rank has no outputs (a stage
    before the last). See [Note: rounds].
    """
    # Several batches fill a pipeline; elsewhere they would only take memory.
    width = 1 if engine.runner.manual else engine.ctx.batch.gas
    device = engine.ctx.accelerator.current_device()
    spare: Any = None
    while True:
        mine = list(islice(batches, width))
        counts = comm.all_gather_json(len(mine))
        if not (most := max(counts)):
            return
        run = [b.values for b in mine]
        if spare is None:
            # Only the first round may be without a spare batch, on any rank.
            spare = shared(run[-1] if run else None, counts, device)
        spare = run[-1] if run else spare
        run = [to_device(b, device) for b in run + [spare] * (most - len(run))]
        outputs = _outputs(engine, run, forward)
        if outputs is None:
            yield None
        else:
            rows = zip(outputs, run, mine, strict=False)  # what is run beyond `mine` is dropped
            yield [(out, batch) for out, batch, pulled in rows if pulled.counts]


def _outputs(engine: Engine, run: list[Any], forward: Forward | None) -> list[Any] | None:
    """The outputs of each batch; None on ranks that do not have them (stages before the last)."""
    if forward is not None:
        return [forward(engine, batch) for batch in run]
    if engine.runner.manual:
        return [call_with_batch(engine, batch) for batch in run]
    _, outputs = engine.runner.evaluate(
        engine, iter(run), len(run), return_logits=True, compute_loss=False
    )
    if outputs is None:
        return None
    return list(outputs) if len(run) > 1 else [outputs]


def _over_ranks(engine: Engine, scores: Mapping[str, Score], has_outputs: bool) -> dict[str, float]:
    """The metrics over all samples. Ranks that have had the same samples count once."""
    # `state` may be collective among the ranks that have outputs.
    mine = {name: score.state() for name, score in scores.items()} if has_outputs else None
    first: dict[int, dict[str, list[float]]] = {}
    for index, states in comm.all_gather_json([engine.ctx.mesh.index("batch"), mine]):
        if states is not None:
            first.setdefault(index, states)
    if not first:
        raise UsageError("engine.evaluate: no rank has a batch; is the dataset empty?")
    return {name: totals([states[name] for states in first.values()]) for name in scores}
