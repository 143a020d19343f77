"""old-compile-pass: changes the graphs of torch.compile; ``plugin.py`` is the declaration."""
