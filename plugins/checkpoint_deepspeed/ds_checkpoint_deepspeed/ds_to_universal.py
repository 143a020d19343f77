"""The command ``ds_to_universal``: a universal checkpoint of DeepSpeed's out of one of ds_core's,
or of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_checkpoint_deepspeed.exporting import export_universal
from ds_core.errors import DSError


def main(argv: Sequence[str] | None = None) -> None:
    """Run it; ends the process with an error message where it fails."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Write a universal checkpoint."
    )
    parser.add_argument(
        "--input_folder", required=True, help="a checkpoint: the folder with the tag's name"
    )
    parser.add_argument(
        "--output_folder",
        required=True,
        help="the folder to write; `latest_universal` is beside it",
    )
    without = (
        "without effect: one process converts, a weight at a time, and nothing temporary is written"
    )
    parser.add_argument("--num_extract_workers", default=4, type=int, help=without)
    parser.add_argument("--num_merge_workers", default=2, type=int, help=without)
    parser.add_argument("--keep_temp_folder", action="store_true", help=without)
    parser.add_argument(
        "--no_strict",
        action="store_true",
        help="without effect: what is converted is always checked",
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="without effect: no such state is needed",
    )
    given = parser.parse_args(argv)
    try:
        print(export_universal(given.input_folder, given.output_folder))
    except DSError as error:
        sys.exit(f"ds_to_universal: {error}")


if __name__ == "__main__":
    main()
