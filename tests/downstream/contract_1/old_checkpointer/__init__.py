"""old-checkpointer: saves and loads checkpoints; ``plugin.py`` is the declaration."""
