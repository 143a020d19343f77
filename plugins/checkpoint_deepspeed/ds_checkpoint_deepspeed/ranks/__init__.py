"""``deepspeed.checkpoint``: a folder as fewer ranks see it."""
