"""old-monitor: where metrics are written; ``plugin.py`` is the declaration."""
