"""``deepspeed.utils`` and small functions of ``deepspeed.runtime``."""
