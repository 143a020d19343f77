"""old-accelerator: a type of device; ``plugin.py`` is the declaration."""
