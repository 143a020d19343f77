"""old-loader: turns a dataset into batches; ``plugin.py`` is the declaration."""
