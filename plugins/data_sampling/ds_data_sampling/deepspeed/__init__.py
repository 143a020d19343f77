"""The same under DeepSpeed's names."""
