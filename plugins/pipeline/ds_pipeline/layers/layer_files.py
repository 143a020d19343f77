"""The weights of single layers in files of their own, under the names that DeepSpeed gives them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_pipeline.layers.topology import PipelineParallelGrid


class LayerFiles:
    """What a `PipelineModule` has for files of single layers."""

    _grid: PipelineParallelGrid
    _chunks: list[list[tuple[int, Callable[[Any], Any]]]]

    def _own_layers(self) -> Sequence[tuple[int, Callable[[Any], Any]]]:
        """Number in the whole model, and layer, of all layers of this stage."""
        return [row for chunk in self._chunks for row in chunk]

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """How the names of this rank's files begin: ``PATH/TAG/module-pipe_00``, with ``-model_00``
        where it is cut.
        """
        topology = self._grid.topology
        here = topology.get_coord(self._grid.global_rank)
        places = [
            f"-{axis}_{getattr(here, axis):02d}"
            for axis in topology.get_axis_names()
            if axis != "data"
        ]
        return os.path.join(checkpoints_path, str(tag), "module" + "".join(places))

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of a layer of this stage, counted from 0 there:
        ``DIR/layer_07-model_states.pt``.
        """
        number, _ = self._own_layers()[local_layer_idx]
        place = self._grid.topology.get_rank_repr(rank=self._grid.global_rank)
        return os.path.join(
            ckpt_dir, f"layer_{number:02d}{f'-{place}' if place else ''}-model_states.pt"
        )

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The files that there are of that layer: one for each rank that has a part of it."""
        number, _ = self._own_layers()[local_layer_idx]
        return sorted(
            glob.glob(os.path.join(glob.escape(ckpt_dir), f"layer_{number:02d}-*model_states.pt"))
        )

    def save_state_dict(
        self, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False
    ) -> None:
        """Have the weights and buffers of each layer of this stage written, by one of its
        data-parallel ranks.

        checkpoint_engine: the caller's; its ``save(state_dict=..., path=...)`` decides the form of
            the files.

        Raises UsageError where weights are not here whole (ZeRO 3).
        """
        if self._grid.data_parallel_id != 0:
            return
        os.makedirs(save_dir, exist_ok=True)
        for index, (_, layer) in enumerate(self._own_layers()):
            if not isinstance(layer, nn.Module):  # a function has nothing to keep
                continue
            frozen = (
                {n for n, p in layer.named_parameters() if not p.requires_grad}
                if exclude_frozen_params
                else set()
            )
            state = {n: _own(n, t) for n, t in layer.state_dict().items() if n not in frozen}
            checkpoint_engine.save(state_dict=state, path=self.ckpt_layer_path(save_dir, index))


def _own(name: str, tensor: Tensor) -> Tensor:
    """A copy: of a view, an engine may write all of its storage."""
    if tensor.numel() == 0:
        raise UsageError(
            f"save_state_dict: {name} is not here whole (ZeRO 3 has parts of it); use "
            "engine.save_checkpoint, and "
            "`dscore checkpoint export-deepspeed` for DeepSpeed's files"
        )
    return tensor.detach().cpu().clone()
