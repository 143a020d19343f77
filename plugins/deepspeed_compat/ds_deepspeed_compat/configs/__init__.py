"""DeepSpeed's config: objects, readers, migration."""
