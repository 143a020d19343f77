"""old-precision: dtypes, loss scaling, layers; ``plugin.py`` is the declaration."""
