"""fp32 weights out of a checkpoint, of ds_core or of DeepSpeed: the documented functions, and
``zero_to_fp32``.

DeepSpeed's weights have DeepSpeed's names, except where they are loaded into a model.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint import offline
from torch import nn

from ds_checkpoint_deepspeed.opened import open_any
from ds_core.errors import CheckpointError, DSError

_DTYPES = {
    "float32": "fp32",
    "fp32": "fp32",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """`ds_checkpoint.get_fp32_state_dict_from_zero_checkpoint`, also of DeepSpeed's checkpoints."""
    return offline.get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode, opened=open_any
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """`ds_checkpoint.load_state_dict_from_zero_checkpoint`, also of DeepSpeed's checkpoints."""
    opened = functools.partial(open_any, our_names=True)
    return offline.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag, opened=opened)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Write a checkpoint's weights to safetensors files, with an index when there are several; the
    files.

    Weights that are in `output_dir` are replaced.

    dtype: of floating-point tensors: float32, float16 or bfloat16.
    safe_serialization: False, which asks for pickles, is answered with safetensors too, and a
        warning.
    """
    name = _DTYPES.get(str(dtype).removeprefix("torch.").lower())
    if name is None:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    return offline.convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
        dtype=name,
        opened=open_any,
    )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """`convert_zero_checkpoint_to_state_dict` to fp32."""
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command ``zero_to_fp32``; ends the process with an error message where it fails."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32", description="Write a checkpoint's weights to safetensors."
    )
    parser.add_argument("checkpoint_dir", help="the folder above the checkpoint's")
    parser.add_argument("output_dir", help="where to write the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes per file (5GB)")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="without effect: files are safetensors"
    )
    parser.add_argument("-t", "--tag", help="the checkpoint; default: the one that `latest` names")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what was not trained"
    )
    parser.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16")
    parser.add_argument(
        "-d", "--debug", action="store_true", help="a failure shows where it happened"
    )
    given = parser.parse_args(argv)
    try:
        paths = convert_zero_checkpoint_to_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            dtype=given.dtype,
            max_shard_size=given.max_shard_size,
            tag=given.tag,
            exclude_frozen_parameters=given.exclude_frozen_parameters,
        )
    except DSError as error:
        if given.debug:
            raise
        sys.exit(f"zero_to_fp32: {error}")
    for path in paths:
        print(path)


if __name__ == "__main__":
    main()
