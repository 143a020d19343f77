"""old-transform: changes the model before training; ``plugin.py`` is the declaration."""
