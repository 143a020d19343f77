"""old-runner: runs the micro-batches of a step; ``plugin.py`` is the declaration."""
