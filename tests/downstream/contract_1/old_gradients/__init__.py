"""old-gradients: changes the gradients of a step; ``plugin.py`` is the declaration."""
