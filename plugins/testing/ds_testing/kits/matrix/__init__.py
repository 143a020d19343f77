"""Which combinations of features to try."""
