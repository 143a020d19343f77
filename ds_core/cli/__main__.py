"""``python -m ds_core.cli``."""

from __future__ import annotations

from ds_core.cli import main

if __name__ == "__main__":
    main()
