"""``dscore top``."""
