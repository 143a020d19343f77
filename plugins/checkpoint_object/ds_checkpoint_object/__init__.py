"""Checkpoints in object stores, by their URL: ``engine.save_checkpoint("s3://bucket/run")``."""
