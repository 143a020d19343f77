"""The build hook: see ``ds_kernel_kit/wheels.py``, which lies in this clone, or beside this file in
an sdist.
"""

import runpy
from pathlib import Path

HERE = Path(__file__).parent
PLACES = (
    HERE / "ds_kernel_kit_wheels.py",
    HERE.parents[1] / "ops" / "kernel_kit" / "ds_kernel_kit" / "wheels.py",
)
# Run by its path: the kit need not be installed for a wheel that carries no libraries.
get_build_hook = runpy.run_path(str(next(p for p in PLACES if p.exists())))["get_build_hook"]
