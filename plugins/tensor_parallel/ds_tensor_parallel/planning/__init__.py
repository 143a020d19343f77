"""``dscore plan``: memory and traffic, told before anything runs."""
