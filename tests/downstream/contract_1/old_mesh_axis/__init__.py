"""old-mesh-axis: an axis along which parameters differ; ``plugin.py`` is the declaration."""
