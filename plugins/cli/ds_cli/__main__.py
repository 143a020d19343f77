"""``python -m ds_cli``."""

from __future__ import annotations

from ds_cli import main

if __name__ == "__main__":
    main()
