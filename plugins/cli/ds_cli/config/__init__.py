"""``dscore config``: check and explain configs."""
