"""Read and set the states of single parameters while training; see `ds_access.states`."""

from ds_access.states import *  # noqa: F403
from ds_access.states import __all__ as __all__
