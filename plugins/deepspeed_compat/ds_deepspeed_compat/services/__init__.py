"""``deepspeed.comm``, ``accelerator``, ``monitor``, ``io`` and kin."""
