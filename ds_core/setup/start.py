"""`initialize` as programs import it. Its overloads are in the stub: what was given decides which
parts of the answer cannot be None.
"""

from ds_core.setup.assemble import Initialized, initialize  # noqa: F401  - the stub hands them on
