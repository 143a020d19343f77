"""Any function of tensors of a sequence in tiles, with DeepSpeed's names and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_sequence_parallel.tiles.tiled import tiled, weights_of


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """``fn(**kwargs_to_shard, **kwargs_to_pass)``, computed in `shards` tiles.

    kwargs_to_shard: tensors [batch, seqlen, ...] and None; that of `grad_requiring_tensor_key` is
        [batch, seqlen, width].
    kwargs_to_pass: passed to each tile as they are.
    compute_params: the parameters that `fn` uses; None: those of the modules in kwargs_to_pass.
    output_unshard_dimension: 1, the sequence of the result; 0 where `fn` returns a scalar.
    output_reduction: then "mean", in which a tile counts by its length, or "sum".
    """
    key = grad_requiring_tensor_key
    _check_arguments(seqlen, kwargs_to_shard, key, output_unshard_dimension, output_reduction)
    scalar = output_unshard_dimension == 0
    # `tiled` cuts along the sequence of its first input, so the one with a gradient comes first.
    names = [
        key,
        *(
            name
            for name, value in kwargs_to_shard.items()
            if isinstance(value, Tensor) and name != key
        ),
    ]
    none = {name: value for name, value in kwargs_to_shard.items() if name not in names}
    if given := [name for name, value in none.items() if value is not None]:
        raise UsageError(
            f"sequence_tiled_compute: {', '.join(given)} of kwargs_to_shard is no tensor"
        )
    if compute_params is None:
        modules = [value for value in kwargs_to_pass.values() if isinstance(value, nn.Module)]
        compute_params = list(dict.fromkeys(p for module in modules for p in weights_of(module)))

    def run(*tiles: Tensor) -> Tensor:
        out = fn(**dict(zip(names, tiles, strict=True)), **none, **kwargs_to_pass)
        return out * (tiles[0].shape[1] / seqlen) if scalar and output_reduction == "mean" else out

    inputs: list[Tensor] = [kwargs_to_shard[name] for name in names]
    return tiled(run, inputs, shards, compute_params, loss=scalar)


def _check_arguments(
    seqlen: int,
    kwargs_to_shard: Mapping[str, Any],
    key: str,
    output_unshard_dimension: int,
    output_reduction: str | None,
) -> None:
    """Raise UsageError for a first tensor or an output that cannot be tiled."""
    if (
        not isinstance(first := kwargs_to_shard.get(key), Tensor)
        or first.dim() != 3
        or first.shape[1] != seqlen
    ):
        shown = tuple(first.shape) if isinstance(first, Tensor) else first
        raise UsageError(
            f"sequence_tiled_compute: grad_requiring_tensor_key is {key!r}, which must be a tensor "
            f"[batch, {seqlen}, width] of kwargs_to_shard, and is {shown}"
        )
    if output_unshard_dimension not in (0, 1) or (
        output_unshard_dimension == 0 and output_reduction not in ("mean", "sum")
    ):
        raise UsageError(
            "sequence_tiled_compute: output_unshard_dimension is 1, or 0 with an output_reduction "
            f"of 'mean' or 'sum'; it is {output_unshard_dimension} with {output_reduction!r}"
        )


class SequenceTiledCompute:
    """``apply`` as DeepSpeed's autograd function has it: keys first, then the values of both kinds
    in that order.
    """

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """See `sequence_tiled_compute`."""
        if len(args) != len(keys_to_shard) + len(keys_to_pass):
            raise UsageError(
                f"SequenceTiledCompute.apply: {len(keys_to_shard)} keys to shard and "
                f"{len(keys_to_pass)} to pass need as many arguments, and there are {len(args)}"
            )
        cut = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args[:cut], strict=True)),
            dict(zip(keys_to_pass, args[cut:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )
