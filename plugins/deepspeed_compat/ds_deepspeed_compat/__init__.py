"""Scripts written for DeepSpeed on ds_core: ``import deepspeed`` gives ds_core and its plugins.

`install` puts the finder into effect; `names` is the table of all names. Nothing is imported here
but the finder.
"""

from __future__ import annotations

from ds_deepspeed_compat.finder import install

__all__ = ["install"]
