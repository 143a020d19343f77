"""``python -m ds_core.compat SCRIPT [ARGS]``."""

from ds_core.compat import main

main()
