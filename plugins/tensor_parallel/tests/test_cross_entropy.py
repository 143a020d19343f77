"""Cross entropy of divided logits: equal to torch's of the whole, values and gradients; in models
of transformers.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import difference, plain, train
from tp_models import ADAMW, hugging_face, ids, settings, texts, weights_off
from tp_models import VOCABULARY as SIZE

from ds_core import comm

TOKENS = (2, 5)
VOCABULARY = 11


class Head:
    """What `parallel_cross_entropy` asks of a head."""

    def __init__(self, ranks: int) -> None:
        from ds_tensor_parallel.layers.linear import Place
        from ds_tensor_parallel.planning.division import Division

        self.division = Division.by_unit((VOCABULARY,), 1, ranks)
        self.tp = Place(torch.distributed.group.WORLD, ranks, comm.rank()) if ranks > 1 else None


def errors_of_reductions(world: int) -> dict[str, float]:
    from ds_tensor_parallel import parallel_cross_entropy

    head = Head(world)
    off = {}
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(*TOKENS, VOCABULARY, dtype=torch.float64, generator=generator) * 20
    target = torch.randint(VOCABULARY, TOKENS, generator=generator)
    target[0, 1] = -100
    ((first, size),) = head.division.ranges(comm.rank())
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
        whole = logits.clone().requires_grad_()
        part = logits[..., first : first + size].clone().requires_grad_()
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        wanted = functional.cross_entropy(whole.transpose(1, 2), target, **options)
        got = parallel_cross_entropy(part, target, head, **options)
        weight = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
        (wanted * weight).sum().backward()
        (got * weight).sum().backward()
        assert whole.grad is not None and part.grad is not None
        grad = (part.grad - whole.grad[..., first : first + size]).abs().max()
        off[f"{reduction}, {smoothing}"] = max(float((got - wanted).abs().max()), float(grad))
    return off


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_torch(world: int) -> None:
    for off in run_ranks(world, errors_of_reductions, world):
        assert max(off.values()) < 1e-12, off


def in_a_model(kind: str) -> dict[str, Any]:
    """Three steps in fp32, and what the logits are in training and in evaluation."""
    import ds_core
    from ds_core.errors import UsageError

    truth = hugging_face(kind).float()
    losses = plain(truth, texts, 3, optimizer=ADAMW)
    engine, *_ = ds_core.initialize(model=hugging_face(kind).float(), config=settings(2))
    head = engine.module.get_output_embeddings()
    widths = []
    head.register_forward_hook(lambda module, args, out: widths.append(out.shape[-1]))
    got = train(engine, texts, 3)
    found: dict[str, Any] = {
        "losses": difference(got, losses),
        "widths": widths[:],
    }
    found["weights"] = weights_off(engine, truth)
    batch = ids(9, 0)
    wanted = truth(input_ids=batch, labels=batch)
    trained = engine(input_ids=batch, labels=batch)
    with pytest.raises(UsageError, match="vocab_parallel_loss"):
        trained.logits.argmax(-1)
    found["without labels"] = float((engine(input_ids=batch).logits - wanted.logits).abs().max())
    tuples = engine(input_ids=batch, labels=batch, return_dict=False)
    found["tuple"] = abs(float(tuples[0].detach() - wanted.loss.detach()))
    engine.eval()
    with torch.no_grad():
        out = engine(input_ids=batch, labels=batch)
        found["evaluated"] = float(
            (out.logits - wanted.logits).abs().max() + (out.loss - wanted.loss).abs()
        )
    engine.destroy()
    return found


@pytest.mark.fast_cases("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_compute_their_loss_from_divided_logits(kind: str) -> None:
    for found in run_ranks(2, in_a_model, kind):
        assert max(found.pop("widths")) <= (SIZE + 1) // 2
        assert max(found.values()) < 2e-6, found
