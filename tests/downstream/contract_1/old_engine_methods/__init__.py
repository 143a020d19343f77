"""old-engine-methods: methods for the engine; ``plugin.py`` is the declaration."""
