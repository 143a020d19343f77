"""What is tried, in which order, and why it won."""
