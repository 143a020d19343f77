"""dscore-progressive-layer-drop: layers are skipped in training, ever more of them and mostly the
last."""

__version__ = "0.1.0"
