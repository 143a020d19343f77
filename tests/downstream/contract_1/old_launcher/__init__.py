"""old-launcher: starts processes for dscore run; ``plugin.py`` is the declaration."""
