"""old-state-store: where offloaded states are kept; ``plugin.py`` is the declaration."""
