"""A distribution by somebody who has only the documents of ds_core."""
