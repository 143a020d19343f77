"""``ds_report``: which operations work here, and what is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_deepspeed_compat.version import VERSION


def report() -> str:
    """The report as text."""
    import torch

    from ds_core import __version__
    from ds_core.accelerator import get_accelerator
    from ds_deepspeed_compat.services import op_builder

    compatible = op_builder.compatible_ops
    rows = [f"{name:.<24} {'[OKAY]' if works else '[NO]'}" for name, works in compatible.items()]
    facts = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "deepspeed": f"{VERSION}, served by ds_core {__version__}",
        "accelerator": repr(get_accelerator()),
    }
    return "\n".join(
        [
            "compiled operations that can serve on this machine (`dscore ops list` has all "
            "kernels)",
            *rows,
            "",
            *(f"{name:.<24} {value}" for name, value in facts.items()),
            "",
            "`dscore doctor` examines the rest.",
        ]
    )


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report."""
    text = report()
    print(text.partition("\n\n")[2] if hide_operator_status else text)


def cli_main(args: Sequence[str] | None = None) -> None:
    """The command ``ds_report``."""
    parser = argparse.ArgumentParser(
        prog="ds_report", description="Show which operations work here."
    )
    parser.add_argument(
        "--hide_operator_status", action="store_true", help="leave the operations out"
    )
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="without effect: there are none"
    )
    found = parser.parse_args(args)
    main(hide_operator_status=found.hide_operator_status)
