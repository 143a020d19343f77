from pydantic import Field

from ds_core.config import Section


class MySignParams(Section):
    lr: float = Field(0.1, gt=0, description="Length of a step.")
