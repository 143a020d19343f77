"""old-memory: how much memory model states take; ``plugin.py`` is the declaration."""
