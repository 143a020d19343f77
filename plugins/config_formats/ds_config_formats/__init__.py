"""Config files in hjson, YAML and TOML for ds_core."""
