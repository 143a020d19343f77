"""AutoEP by patterns, and by a preset of somebody else's, on blocks of our own: every key that says
how to route.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import (
    ADAMW,
    FAMILIES,
    OWN_PATTERNS,
    VOCABULARY,
    Mixture,
    OldBlock,
    Own,
    alone,
    hugging_face,
    ids,
    own_config,
    settings,
    texts,
    unless_installed,
)
from ds_testing import run_ranks
from ds_testing.truth import difference, plain, train

SHORT = 4
# What the block does, whether its experts are a list, and the keys that make AutoEP do the same.
CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "stacked": ({}, False, {}),
    "stacked, one by one": ({}, False, {"use_grouped_mm": False}),
    "listed": ({}, True, {}),
    "listed, one by one": ({}, True, {"use_grouped_mm": False}),
    "sigmoid": (
        {"sigmoid": True, "norm": False, "scale": 1.5},
        False,
        {
            "score_func": "sigmoid",
            "route_norm": False,
            "route_scale": 3.0,
            "routed_scaling_factor": 0.5,
        },
    ),
    "groups": ({"groups": (4, 2)}, True, {"num_expert_groups": 4, "num_limited_groups": 2}),
    "before": ({"before": True}, False, {"score_apply": "pre", "validate_folding_routing": True}),
    "product": ({}, False, {"combine_impl": "legacy_bmm", "validate_folding_routing": True}),
    "more": ({"each": 3}, False, {"top_k": 3}),
}


def errors(
    world: int, names: list[str], runs: list[tuple[int, int]]
) -> dict[str, dict[str, float]]:
    import ds_core

    found = {}
    for name in names:
        how, listed, keys = CASES[name]
        truth = Own(listed, **how)
        losses = alone(truth, world, SHORT)
        patterns = {
            k: v for k, v in OWN_PATTERNS.items() if k != "top_k_attr" or "top_k" not in keys
        }
        for ep, stage in runs:
            model = Own(listed, **how)
            model.config.each = 2  # the section's top_k says otherwise
            engine, *_ = ds_core.initialize(
                model=model, config=settings(ep, stage, **patterns, **keys)
            )
            got = train(engine, texts, SHORT)
            assert sum("pool" in n for n, _ in model.named_parameters()) == (
                2 * 3 * (8 // ep if listed else 1)
            )
            engine.destroy()
            found[f"{name}, ep {ep}, stage {stage}"] = {
                "losses": difference(got, losses),
                "weights": difference(engine.module, truth),
            }
    return found


@pytest.mark.parametrize(
    ("world", "runs"),
    [
        (1, [(1, 0)]),
        (2, [(2, 0), (2, 3), (1, 1)]),
        pytest.param(4, [(4, 2), (2, 3)], marks=pytest.mark.slow),
    ],
    ids=["1", "2", "4"],
)
@pytest.mark.slow
def test_blocks_found_by_patterns_train_as_in_plain_torch(
    world: int, runs: list[tuple[int, int]]
) -> None:
    names = list(CASES) if world < 4 else ["stacked", "listed", "listed, one by one"]
    for rank, found in enumerate(run_ranks(world, errors, world, names, runs)):
        for case, off in found.items():
            assert max(off.values()) < 1e-12, f"rank {rank}, {case}: {off}"


def reroute(kind: str) -> dict[str, float]:
    """A family's routing by AutoEP's own block, from what its preset says, against the model's."""
    from ds_moe.autoep.block import AutoEPMoELayer

    import ds_core

    truth = hugging_face(kind)
    model = hugging_face(kind)
    factor = getattr(model.config, "routed_scaling_factor", 1.0)
    keys = {"routed_scaling_factor": 0.5, "route_scale": 2.0 * factor}
    engine, *_ = ds_core.initialize(model=model, config=settings(2, 0, **keys))
    assert any(isinstance(m, AutoEPMoELayer) for m in model.modules())
    out = {}
    for number in range(4):
        batch = ids(number, 0)
        ours = engine(input_ids=batch, labels=batch, output_router_logits=True)
        theirs = truth(input_ids=batch, labels=batch, output_router_logits=True)
        out[f"logits {number}"] = float((ours.logits - theirs.logits).abs().max())
        if getattr(theirs, "router_logits", None) is not None:
            pairs = zip(ours.router_logits, theirs.router_logits, strict=True)
            out[f"router {number}"] = max(float((a - b).abs().max()) for a, b in pairs)
    engine.destroy()
    return out


@pytest.mark.fast_cases("mixtral", "deepseek_v2", "deepseek_v3")
@pytest.mark.parametrize("kind", [*FAMILIES, "qwen2_moe"])
def test_presets_say_what_the_models_routers_do(kind: str) -> None:
    for off in run_ranks(2, reroute, kind):
        assert max(off.values()) < 2e-6, off


def old_style(stage: int, keys: dict[str, Any]) -> float:
    import ds_core

    truth = hugging_face("deepseek_v3")
    model = hugging_face("deepseek_v3")
    model.model.layers[1].mlp = OldBlock(model.model.layers[1].mlp)
    engine, *_ = ds_core.initialize(model=model, config=settings(2, stage, **keys))
    batch = ids(1, 0)
    with torch.no_grad():
        off = engine(input_ids=batch).logits - truth(input_ids=batch).logits
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    first = 4 * engine.ctx.mesh.index("ep")
    assert (
        names[0] == f"model.layers.1.mlp.experts.{first}.gate_proj.weight" and len(names) == 4 * 3
    )
    engine.destroy()
    return float(off.abs().max())


def test_experts_of_a_family_may_be_a_list() -> None:
    for stage, keys in ((0, {}), (3, {}), (0, {"use_grouped_mm": False})):
        assert max(run_ranks(2, old_style, stage, keys)) < 2e-6


def other_top_k() -> dict[str, float]:
    import ds_core

    truth, model, before = (hugging_face("mixtral", num_experts_per_tok=k) for k in (3, 2, 2))
    engine, *_ = ds_core.initialize(model=model, config=settings(2, 0, top_k=3))
    batch = ids(0, 0)
    with torch.no_grad():
        ours, theirs, others = (m(input_ids=batch).logits for m in (engine, truth, before))
    engine.destroy()
    return {"off": float((ours - theirs).abs().max()), "moved": float((ours - others).abs().max())}


def test_top_k_overrides_the_models() -> None:
    for off in run_ranks(2, other_top_k):
        assert off["off"] < 2e-6 < off["moved"], off


# -- whose weights ---------------------------------------------------------------------------------


def differing(listed: bool, stage: int) -> dict[str, float]:
    """Ranks come with different weights, and with an optimizer or groups made before."""

    import ds_core
    from ds_core import comm

    truth = Own(listed)
    model = Own(listed)
    for param in model.parameters():
        param.data += comm.rank()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    given = {} if listed else {"optimizer": optimizer}
    engine, *_ = ds_core.initialize(model=model, config=settings(2, stage, **OWN_PATTERNS), **given)
    engine.destroy()
    now = dict(engine.module.named_parameters())
    same = [n for n in now if now[n] is before[n]]
    return {"weights": difference(engine.module, truth), "others": float(len(now) - len(same))}


def test_all_ranks_begin_with_the_first_ones_weights() -> None:
    for world, listed, stage in ((2, False, 0), (2, True, 1), (4, False, 3), (4, True, 0)):
        for off in run_ranks(world, differing, listed, stage):
            assert off == {"weights": 0.0, "others": 0.0}


def lengths() -> bool:
    """Each rank generates another number of tokens."""

    import ds_core
    from ds_core import comm

    truth = hugging_face("mixtral").eval()
    count = 3 + 4 * comm.rank()
    engine, *_ = ds_core.initialize(model=hugging_face("mixtral"), config=settings(2, 0))
    how = {"max_new_tokens": count, "do_sample": False, "use_cache": True}
    mine = engine.eval().generate(ids(3, 0), synced_gpus=True, **how)
    engine.destroy()
    return torch.equal(mine, truth.generate(ids(3, 0), **how))


def test_ranks_generate_as_much_as_each_wants() -> None:
    assert run_ranks(2, lengths) == [True, True]


# -- in a pipeline ---------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.moe = Mixture(own_config(), listed=False)
        self.moe.pool.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    made = [nn.Embedding(VOCABULARY, 16), *(Layer() for _ in range(3)), nn.Linear(16, VOCABULARY)]
    return [layer.double() for layer in made]


def loss_of(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def in_stages(stages: int, ep: int) -> float:
    """How far weights of this stage are from those of plain torch; each stage has other blocks, or
    none.
    """
    from ds_pipeline import PipelineModule

    import ds_core
    from ds_core import comm

    dp = comm.world_size() // stages
    truth = nn.Sequential(*layers())
    plain(
        truth,
        ids,
        count=2 * dp,
        clip=0.5,
        optimizer=ADAMW,
        loss=lambda model, tokens: loss_of(model(tokens), tokens),
    )
    # A pipeline has no config of the model's; it says which names its layers have.
    patterns = {k: v for k, v in OWN_PATTERNS.items() if not k.endswith("_attr")}
    config = settings(ep, 1, **patterns | {"moe_layer_pattern": r"layers\.\d+\.moe", "top_k": 2})
    config |= {"gradient_accumulation_steps": 2}
    config["plugins"]["load"] += unless_installed(pipeline="ds_pipeline.plugin")
    model = PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    engine, *_ = ds_core.initialize(model=model, config=config)
    place = engine.ctx.mesh.index("dp")
    for step in range(3):
        engine.train_batch(iter([(ids(step, 2 * place + part),) * 2 for part in range(2)]))
    engine.destroy()
    named = {f"layers.{name}": param for name, param in truth.named_parameters()}
    worst = 0.0
    for name, mine in engine.module.named_parameters():
        worst = max(worst, float((mine - named[name]).abs().max()))
    return worst


@pytest.mark.slow
def test_experts_are_divided_inside_pipeline_stages() -> None:
    assert max(run_ranks(4, in_stages, 2, 2)) < 1e-12
    assert max(run_ranks(2, in_stages, 2, 1)) < 1e-12
