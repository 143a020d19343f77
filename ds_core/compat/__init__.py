"""``import deepspeed`` gives ds_core: what the package dscore-deepspeed-compat does, by a name of the
core.

``import ds_core.compat; ds_core.compat.install()`` first in a script, or
``python -m ds_core.compat SCRIPT``.
"""

import importlib

try:
    _served = importlib.import_module("ds_deepspeed_compat.__main__")
except ModuleNotFoundError as error:
    from ds_core.catalogue import install

    error.msg = (
        "ds_core.compat needs the package dscore-deepspeed-compat; install it with "
        f"{install('dscore-deepspeed-compat')}"
    )
    raise

install = _served.install
main = _served.main
