"""old-divided-layers: divides layers among ranks; ``plugin.py`` is the declaration."""
