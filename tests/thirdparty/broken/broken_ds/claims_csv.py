"""Claims a section that another distribution owns."""

from pydantic import BaseModel


class Taken(BaseModel):
    """Anything goes."""

    enabled: bool = False


def ds_config():
    """The model of the claimed section."""
    return Taken
