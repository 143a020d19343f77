"""What one operation of torch costs: the counting rules, by operation.

MACs are the multiplications that are summed up in products: matrix products, convolutions,
attention. One is two FLOPs. On top of that each element counts: a convolution's bias 1; a norm 4,
or 5 with a weight, and in evaluation mode, where it has its statistics, 1 or 2; softmax,
activations and pooling 1 (of the input); resizing 1 (of the output). All else, such as embedding,
dropout, addition and reshaping, counts 0, and so does a linear layer's bias.

An operation that is not in the table is looked up in ``torch.utils.flop_counter``, where anybody
may register a formula (`register_flop_formula`); half of its FLOPs are MACs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Work = tuple[int, int]
"""FLOPs and MACs."""
Formula = Callable[[Any, Any, Any], Work]
"""From the arguments, the keyword arguments and the result of an operation."""


def formula_of(operation: Any) -> Formula | None:
    """The rule for an operation of torch; None: it counts 0."""
    packet = getattr(operation, "overloadpacket", operation)
    name = getattr(operation, "_schema", None)
    rule = None if name is None else _RULES.get(name.name.removesuffix("_"))
    if rule is None and packet in flop_registry:
        return _registered(flop_registry[packet])
    return rule


def _registered(flops_of: Callable[..., int]) -> Formula:
    def formula(args: Any, kwargs: Any, out: Any) -> Work:
        flops = int(flops_of(*args, **kwargs, out_val=out))
        return flops, flops // 2

    return formula


def _products(macs: int, more: int = 0) -> Work:
    return 2 * macs + more, macs


# -- matrix products -------------------------------------------------------------------------------


def _matrix(a: Tensor, b: Tensor) -> Work:
    """The last dimension of `a` with the last but one of `b`; `a` may have a batch."""
    return _products(a.numel() * b.shape[-1])


def _mm(args: Any, kwargs: Any, out: Any) -> Work:
    return _matrix(args[0], args[1])


def _addmm(args: Any, kwargs: Any, out: Any) -> Work:
    return _matrix(args[1], args[2])


def _linear(args: Any, kwargs: Any, out: Any) -> Work:
    return _products(args[0].numel() * args[1].shape[0])


def _vector(args: Any, kwargs: Any, out: Any) -> Work:
    return _products(args[0].numel())


def _addmv(args: Any, kwargs: Any, out: Any) -> Work:
    return _products(args[1].numel())


def _trilinear(args: Any, kwargs: Any, out: Any) -> Work:
    """`nn.Bilinear`: each element of the product of three tensors, which have dimensions of size 1
    to be expanded.
    """
    tensors = list(args[:3])
    for dims, index in zip(args[3:6], range(3), strict=True):
        for dim in sorted(dims):
            tensors[index] = tensors[index].unsqueeze(dim)
    return _products(math.prod(torch.broadcast_shapes(*(t.shape for t in tensors))))


def _grouped_mm(args: Any, kwargs: Any, out: Any) -> Work:
    """Products of matrices whose rows (or inner dimension, for two of two dimensions) belong to
    groups.
    """
    a = args[0]
    b = args[1]
    macs = a.numel() * b.shape[-1]
    return _products(macs * (b.shape[0] if a.dim() == 2 and b.dim() == 3 and out.dim() == 3 else 1))


# -- convolutions ----------------------------------------------------------------------------------


def _convolution(args: Any, kwargs: Any, out: Any) -> Work:
    """aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding,
    groups)
    """
    x = args[0]
    weight = args[1]
    bias = args[2]
    transposed = args[6]
    positions = x.numel() // x.shape[1] if transposed else out.numel() // out.shape[1]
    return _products(positions * weight.numel(), 0 if bias is None else out.numel())


# -- attention -------------------------------------------------------------------------------------


def _attention(args: Any, kwargs: Any, out: Any) -> Work:
    """Queries by keys, and their weights by values; a causal mask saves nothing. [..., positions,
    width]
    """
    q, k, v = args[:3]
    return _products(q.numel() * k.shape[-2] + math.prod(q.shape[:-1]) * k.shape[-2] * v.shape[-1])


def _attention_backward(args: Any, kwargs: Any, out: Any) -> Work:
    """The weights anew, and the gradients of weights, values, queries and keys."""
    q, k, v = args[1:4]
    weights = math.prod(q.shape[:-1]) * k.shape[-2]
    return _products(weights * (3 * q.shape[-1] + 2 * v.shape[-1]))


# -- recurrent layers ------------------------------------------------------------------------------

_GATES = {1: 1, 3: 3, 4: 5}
"""Activations per unit, by the number of its gates: RNN, GRU, and LSTM, which has one more for its
output.
"""


def _recurrent(rows: int, weight: Tensor, recurrent: Tensor) -> Work:
    """One layer in one direction; rows: steps times batch.

    weight: [gates * hidden, in].
    """
    macs = rows * (weight.numel() + recurrent.numel())
    hidden = recurrent.shape[1]
    return _products(macs, rows * hidden * _GATES.get(weight.shape[0] // hidden, 1))


def _mkldnn_rnn(args: Any, kwargs: Any, out: Any) -> Work:
    """aten.mkldnn_rnn_layer(x, w_ih, w_hh, ...); x: [steps, batch, in]."""
    x = args[0]
    return _recurrent(x.shape[0] * x.shape[1], args[1], args[2])


def _cudnn_rnn(args: Any, kwargs: Any, out: Any) -> Work:
    """aten._cudnn_rnn(x, weights, weights per layer, ...): w_ih, w_hh and perhaps biases, per layer
    and direction.
    """
    x, weights, each = args[:3]
    batches = args[13] if len(args) > 13 else kwargs.get("batch_sizes", ())
    rows = x.shape[0] if batches else x.shape[0] * x.shape[1]
    layers = [_recurrent(rows, weights[i], weights[i + 1]) for i in range(0, len(weights), each)]
    return sum(flops for flops, _ in layers), sum(macs for _, macs in layers)


def _cell(activations: int) -> Formula:
    """A fused cell, whose products are operations of their own; the result's first is the hidden
    state.
    """
    return lambda args, kwargs, out: (activations * out[0].numel(), 0)


# -- what kernels tell -----------------------------------------------------------------------------


def _told(args: Any, kwargs: Any, out: Any) -> Work:
    """`ds_kernel_kit.work.tell`: (like, MACs, elements)"""
    return _products(args[1], args[2])


# -- per element -----------------------------------------------------------------------------------


def _of_input(args: Any, kwargs: Any, out: Any) -> Work:
    return args[0].numel(), 0


def _of_output(args: Any, kwargs: Any, out: Any) -> Work:
    return (out[0] if isinstance(out, (tuple, list)) else out).numel(), 0


def _norm(weight: int, training: int | None = None, own: bool = True) -> Formula:
    """weight: its place in the arguments. training: the place of the flag for statistics of this
    batch; else `own`.
    """

    def formula(args: Any, kwargs: Any, out: Any) -> Work:
        affine = len(args) > weight and args[weight] is not None
        computed = own if training is None else bool(args[training])
        return args[0].numel() * ((4 if computed else 1) + affine), 0

    return formula


def _mean(args: Any, kwargs: Any, out: Any) -> Work:
    """Adaptive pooling to one position is a mean over the last two or three dimensions, which are
    kept.
    """
    dims = args[1] if len(args) > 1 else None
    if (
        isinstance(dims, (list, tuple))
        and sorted(dims) in ([-2, -1], [-3, -2, -1])
        and len(args) > 2
        and args[2]
    ):
        return _of_input(args, kwargs, out)
    return 0, 0


def _table(formula: Formula, names: str) -> dict[str, Formula]:
    return {f"aten::{name}": formula for name in names.split()}


_RULES: dict[str, Formula] = {
    "ds_kernel_kit::work": _told,
    **_table(_mm, "mm bmm _int_mm _scaled_mm"),
    **_table(_addmm, "addmm baddbmm addbmm _addmm_activation"),
    **_table(_linear, "linear"),
    **_table(_vector, "mv dot vdot"),
    **_table(_addmv, "addmv"),
    **_table(_trilinear, "_trilinear"),
    **_table(_grouped_mm, "_grouped_mm _scaled_grouped_mm"),
    **_table(_convolution, "convolution convolution_overrideable _convolution"),
    **_table(
        _attention,
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    **_table(
        _attention_backward,
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_fused_attention_overrideable_backward",
    ),
    **_table(_mkldnn_rnn, "mkldnn_rnn_layer"),
    **_table(_cudnn_rnn, "_cudnn_rnn"),
    **_table(_cell(5), "_thnn_fused_lstm_cell"),
    **_table(_cell(3), "_thnn_fused_gru_cell"),
    **_table(_norm(2), "native_layer_norm _fused_rms_norm"),
    **_table(_norm(1), "native_group_norm"),
    **_table(
        _norm(1, 5), "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"
    ),
    **_table(_norm(1), "_batch_norm_with_update"),
    **_table(_norm(1, own=False), "_batch_norm_no_update"),
    **_table(_mean, "mean"),
    **_table(_of_input, "_softmax _log_softmax"),
    **_table(
        _of_input,
        "relu elu celu leaky_relu hardtanh hardswish hardsigmoid silu gelu mish sigmoid tanh "
        "softplus threshold "
        "log_sigmoid_forward _prelu_kernel rrelu_with_noise hardshrink softshrink glu selu relu6",
    ),
    **_table(
        _of_input,
        "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool2d_with_indices "
        "max_pool3d_with_indices "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
        "fractional_max_pool2d "
        "fractional_max_pool3d",
    ),
    **_table(
        _of_output,
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
        "upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
}
