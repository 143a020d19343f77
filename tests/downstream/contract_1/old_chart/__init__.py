"""old-chart: what dscore plan shows of a config; ``plugin.py`` is the declaration."""
