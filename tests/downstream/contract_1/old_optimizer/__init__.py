"""old-optimizer: an optimizer, by name; ``plugin.py`` is the declaration."""
