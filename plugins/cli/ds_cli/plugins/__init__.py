"""``dscore plugins``: what is installed, and the upgrade of a plugin's sources."""
