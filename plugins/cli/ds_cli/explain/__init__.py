"""``dscore explain``: what an error message means (torch-free)."""
