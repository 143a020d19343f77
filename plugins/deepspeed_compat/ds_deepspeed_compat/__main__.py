"""``python -m ds_deepspeed_compat SCRIPT [ARGS]``: run a script in which ``import deepspeed`` gives
ds_core.

``ds_core.compat`` is another name of it: ``import ds_core.compat; ds_core.compat.install()``.
"""

from __future__ import annotations

import os
import runpy
import sys

from ds_deepspeed_compat.finder import VARIABLE
from ds_deepspeed_compat.finder import install as install

_USAGE = """usage: python -m ds_core.compat SCRIPT [ARGS ...]
       python -m ds_core.compat -m MODULE [ARGS ...]

Run a Python script or module in which `import deepspeed` gives ds_core."""


def main() -> None:
    """Run what the command line names, as Python itself would."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if is_module else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else 2)
    os.environ[VARIABLE] = "1"  # for processes that the script starts
    install()
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
