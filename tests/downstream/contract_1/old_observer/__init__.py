"""old-observer: watches a run; ``plugin.py`` is the declaration."""
