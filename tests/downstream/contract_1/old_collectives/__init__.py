"""old-collectives: serves all-reduce and others; ``plugin.py`` is the declaration."""
