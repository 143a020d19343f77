"""DeepSpeedTransformerLayer against the same layer in plain torch: both forms, every option, fp32,
fp16, bf16.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_ops_cuda.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ds_core.errors import UsageError

H = 32
HEADS = 4
INNER = 48
SAVING = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode")


def config(**changes: Any) -> DeepSpeedTransformerConfig:
    given = {
        "hidden_size": H,
        "intermediate_size": INNER,
        "heads": HEADS,
        "num_hidden_layers": 2,
        "initializer_range": 0.2,
    }
    return DeepSpeedTransformerConfig(**(given | changes))


def layer(seed: int = 0, **changes: Any) -> DeepSpeedTransformerLayer:
    """With biases and norms that are not trivial."""
    torch.manual_seed(seed)
    made = DeepSpeedTransformerLayer(config(**changes))
    with torch.no_grad():
        for name, param in made.named_parameters():
            if name.endswith("b"):
                param.normal_(0, 0.1)
        for weight in (made.attn_nw, made.norm_w):
            weight.uniform_(0.8, 1.5)
    return made


def by_torch(m: DeepSpeedTransformerLayer, x: Tensor, mask: Tensor | None) -> Tensor:
    """The layer without dropout, in torch's own functions."""
    c = m.config
    b, s, _ = x.shape

    def norm(t: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(t, (H,), w, bias, c.layer_norm_eps)

    h = norm(x, m.norm_w, m.norm_b) if c.pre_layer_norm else x
    q, k, v = (
        t.view(b, s, HEADS, -1).transpose(1, 2)
        for t in F.linear(h, m.attn_qkvw, m.attn_qkvb).chunk(3, -1)
    )
    found = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, s, H)
    r = x + F.linear(found, m.attn_ow, m.attn_ob)
    f = norm(r, m.attn_nw, m.attn_nb)
    inner = F.gelu(F.linear(f, m.inter_w, m.inter_b), approximate="tanh")
    y = (r if c.pre_layer_norm else f) + F.linear(inner, m.output_w, m.output_b)
    return y if c.pre_layer_norm else norm(y, m.norm_w, m.norm_b)


def inputs(dtype: torch.dtype = torch.float32, s: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.zeros(3, 1, 1, s)
    mask[1, ..., -2:] = -10000.0
    return torch.randn(3, s, H).to(dtype).requires_grad_(), mask.to(dtype)


def gradients(out: Tensor, x: Tensor, m: DeepSpeedTransformerLayer) -> list[Tensor]:
    torch.manual_seed(2)
    wanted = [x, *m.parameters()]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.randn(out.shape).to(out.dtype))]


@pytest.mark.parametrize("on", ["plain torch", "kernels"])
@pytest.mark.parametrize(
    "pre", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["pre-LN", "post-LN"]
)
def test_equals_plain_torch(pre: bool, on: str, request: pytest.FixtureRequest) -> None:
    """fp32 to rounding; 16-bit within a few roundings of the fp32 result.

    With and without each saving option.
    """
    if on == "kernels":
        request.getfixturevalue("device")
    options: list[dict[str, Any]] = [
        {},
        *({name: True} for name in SAVING),
        dict.fromkeys(SAVING, True),
    ]
    for dtype, tolerance in (
        (torch.float32, 2e-5),
        (torch.float16, 1.5e-2),
        (torch.bfloat16, 0.12),
    ):
        for changes in options:
            m = layer(pre_layer_norm=pre, **changes).to(dtype)
            x, mask = inputs(dtype)
            got = gradients(m(x, mask), x, m)  # type: ignore[arg-type]
            assert all(g.dtype == dtype for g in got)
            wide = layer(pre_layer_norm=pre).to(dtype).float()
            x32 = x.detach().float().requires_grad_()
            wanted = gradients(by_torch(wide, x32, mask.float()), x32, wide)
            for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
                error = ((a.float() - b).norm() / b.norm().clamp(min=1e-3)).item()
                # the key's bias has no effect on the result, so the whole gradient of it is
                # rounding
                assert error < tolerance, (
                    f"result {i} under {changes} in {dtype}: off by {error:.1e}"
                )


def test_saving_options_change_nothing_under_dropout() -> None:
    base: list[Tensor] = []
    for changes in (
        {},
        {"gelu_checkpoint": True},
        {"attn_dropout_checkpoint": True},
        {"normalize_invertible": True},
    ):
        m = layer(attn_dropout_ratio=0.2, hidden_dropout_ratio=0.3, **changes)  # type: ignore[arg-type]
        x, mask = inputs()
        torch.manual_seed(5)
        out = m(x, mask)
        assert isinstance(out, Tensor)
        got = gradients(out, x, m)
        base = base or got
        torch.testing.assert_close(got, base, rtol=1e-4, atol=1e-5)
    x, mask = inputs()
    assert not torch.allclose(base[0], m.eval()(x, mask), atol=1e-2), "there was no dropout"  # type: ignore[arg-type]


def held(m: DeepSpeedTransformerLayer, x: Tensor) -> int:
    """Bytes that the backward pass keeps, parameters and the input aside."""
    known = {p.data_ptr() for p in m.parameters()} | {x.data_ptr()}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        store = t.untyped_storage()
        if store.data_ptr() not in known:
            found[store.data_ptr()] = store.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = m(x)
        del out
    return sum(found.values())


def test_saving_options_save_what_they_say() -> None:
    b = 2
    s = 40
    x = torch.randn(b, s, H, requires_grad=True)
    ratios = {"attn_dropout_ratio": 0.1, "hidden_dropout_ratio": 0.1}
    usual = held(layer(**ratios), x)
    assert usual - held(layer(**ratios, gelu_checkpoint=True), x) == 4 * b * s * INNER
    assert usual - held(layer(**ratios, attn_dropout_checkpoint=True), x) == 4 * b * HEADS * s * s
    # pre-LN: of the two norms' inputs one is the layer's own, which stays in any case
    assert usual - held(layer(**ratios, normalize_invertible=True), x) == 4 * b * s * H


def test_dropout_is_drawn_again_by_activation_checkpointing() -> None:
    m = layer(attn_dropout_ratio=0.3, hidden_dropout_ratio=0.3)
    x, mask = inputs()
    torch.manual_seed(5)
    direct = gradients(m(x, mask), x, m)  # type: ignore[arg-type]
    torch.manual_seed(5)
    again = gradients(checkpoint(m, x, mask, use_reentrant=False), x, m)
    assert all(torch.equal(a, b) for a, b in zip(direct, again, strict=True))


def test_seed_and_generator_decide_dropout() -> None:
    outs = []
    for seed, torch_seed in ((-1, 0), (-1, 0), (7, 0), (-1, 1)):
        m = layer(hidden_dropout_ratio=0.5, seed=seed)
        x, _ = inputs()
        torch.manual_seed(torch_seed)
        outs.append(m(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[3])


def test_initial_weights() -> None:
    m = layer(num_hidden_layers=8, hidden_size=256, intermediate_size=512)
    fresh = DeepSpeedTransformerLayer(
        config(num_hidden_layers=8, hidden_size=256, intermediate_size=512)
    )
    assert fresh.attn_qkvw.std().item() == pytest.approx(0.2, rel=0.05)
    for weight in (fresh.attn_ow, fresh.output_w):
        assert weight.std().item() == pytest.approx(0.2 / math.sqrt(16), rel=0.05)
    plainly = DeepSpeedTransformerLayer(config(adjust_init_range=False, num_hidden_layers=-1))
    assert plainly.output_w.std().item() == pytest.approx(0.2, rel=0.1)
    assert all(not b.any() for n, b in fresh.named_parameters() if n.endswith("b"))
    assert torch.equal(fresh.attn_nw, torch.ones(256)) and torch.equal(
        fresh.norm_w, torch.ones(256)
    )
    weights = [*m.attn_qkvw.chunk(3), m.attn_ow, m.attn_nw, m.inter_w, m.output_w, m.norm_w]
    biases = [*m.attn_qkvb.chunk(3), m.attn_ob, m.attn_nb, m.inter_b, m.output_b, m.norm_b]
    same = config(
        num_hidden_layers=-1, initializer_range=-1, hidden_size=256, intermediate_size=512
    )
    copy = DeepSpeedTransformerLayer(same, weights, biases)
    for (name, a), (_, b) in zip(m.named_parameters(), copy.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.data_ptr() != b.data_ptr()
    with pytest.raises(UsageError, match="initial_weights has 7 tensors; 8 are needed"):
        DeepSpeedTransformerLayer(same, weights[:7], biases)
    with pytest.raises(UsageError, match=r"initial_biases: a tensor is \[512\], \[256\] is needed"):
        DeepSpeedTransformerLayer(same, weights, [*biases[:-1], biases[5]])


def test_fp16_autocast_and_tuples() -> None:
    x, mask = inputs()
    with torch.no_grad():
        assert layer(fp16=True)(x, mask).dtype == torch.float16  # type: ignore[union-attr]
        wanted = layer().half()(x.half(), mask)
        assert torch.equal(layer(fp16=True)(x, mask), wanted)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer()(x, mask), layer().bfloat16()(x.bfloat16(), mask))  # type: ignore[arg-type]
        for name in ("return_tuple", "huggingface"):
            out = layer(**{name: True})(x, mask)
            assert isinstance(out, tuple) and len(out) == 1 and out[0].shape == x.shape
    assert not layer(training=False).training
    assert torch.cuda.is_available() or layer(local_rank=3).inter_w.device.type == "cpu"


def test_layers_are_counted_and_keep_their_own_config() -> None:
    shared = config()
    a = DeepSpeedTransformerLayer(shared)
    b = DeepSpeedTransformerLayer(shared)
    assert b.config.layer_id == a.config.layer_id + 1 == DeepSpeedTransformerLayer.layer_id - 1
    shared.pre_layer_norm = False
    assert a.config.pre_layer_norm


def test_config_from_dict_and_file(tmp_path: Path) -> None:
    given = {"hidden_size": 64, "heads": 4, "fp16": True, "layer_norm_eps": 1e-5}
    made = DeepSpeedTransformerConfig.from_dict(given)
    assert made.intermediate_size == 256 and made == dataclasses.replace(made, **given)
    path = tmp_path / "layer.json"
    path.write_text(json.dumps(given))
    assert DeepSpeedTransformerConfig.from_json_file(path) == made
    with pytest.raises(UsageError, match="has no 'hiden_size'; did you mean 'hidden_size'"):
        DeepSpeedTransformerConfig.from_dict({"hiden_size": 3})
    path.write_text("[1]")
    with pytest.raises(UsageError, match="an object of settings is needed, this is a list"):
        DeepSpeedTransformerConfig.from_json_file(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": -1}, "hidden_size is -1; give a number above 0"),
        ({"heads": 5}, "hidden_size 32 is no multiple of heads 5"),
        ({"attn_dropout_ratio": 1.0}, "attn_dropout_ratio is 1.0; it must be below 1"),
        ({"initializer_range": -1}, "initializer_range is not given"),
        ({"num_hidden_layers": -1}, "adjust_init_range needs it"),
    ],
)
def test_settings_that_no_layer_can_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeepSpeedTransformerLayer(config(**changes))


def test_inputs_that_do_not_fit() -> None:
    m = layer(batch_size=2)
    with pytest.raises(UsageError, match=r"hidden_states are \[2, 32\]"):
        m(torch.zeros(2, 32))
    with pytest.raises(
        UsageError, match=r"a batch of 3 is larger than DeepSpeedTransformerConfig\.batch_size 2"
    ):
        m(torch.zeros(3, 4, 32))
    with pytest.raises(UsageError, match="does not have head_mask, output_attentions"):
        m(torch.zeros(2, 4, 32), None, torch.ones(1), output_attentions=True)
