"""old-metrics: numbers of a step, for monitors; ``plugin.py`` is the declaration."""
