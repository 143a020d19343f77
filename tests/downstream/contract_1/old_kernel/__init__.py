"""old-kernel: serves a named operation; ``plugin.py`` is the declaration."""
