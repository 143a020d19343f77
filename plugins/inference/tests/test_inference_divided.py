"""Every family divided over 2 and 4 ranks: logits and texts are those of the module on one rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from ds_inference import init_inference
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

pytestmark = pytest.mark.slow


def off(names: list[str], tp: int) -> dict[str, tuple[float, bool, bool]]:
    """Of each case: how far logits are, whether greedy texts are equal, and whether a program
    answered.
    """
    import transformers
    from test_inference_families import CASES

    found = {}
    for name in names:
        kind, sizes = CASES[name]
        models = []
        for _ in range(2):
            torch.manual_seed(3)
            cls = getattr(transformers, kind)
            model = cls(cls.config_class(**{"pad_token_id": 0, **sizes})).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.2 if parameter.dim() > 1 else 0.1)
            models.append(model)
        truth, model = models
        engine = init_inference(
            model,
            dtype="fp32",
            tensor_parallel={"tp_size": tp},
            replace_with_kernel_inject=True,
            max_out_tokens=64,
        )
        ids = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            wanted = truth(input_ids=ids)
        far = float((engine(input_ids=ids)[0] - wanted[0]).abs().max() / wanted[0].abs().max())
        same = True
        if kind.endswith(("CausalLM", "LMHeadModel")):
            keys = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
            same = torch.equal(engine.generate(ids, **keys), truth.generate(ids, **keys))
        found[name] = far, same, engine._made.lowered is not None
        engine.destroy()
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_a_divided_family_answers_as_the_module(tp: int) -> None:
    pytest.importorskip("transformers")
    from test_inference_families import CASES

    for rank, found in enumerate(run_ranks(tp, off, list(CASES), tp)):
        assert not {name: row for name, row in found.items() if row[0] > 1e-5 or not row[1]}, (
            f"rank {rank}"
        )
        assert not [name for name, row in found.items() if not row[2]], "the module answered"
