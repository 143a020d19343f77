"""The fixture `lab`, for every pytest run of an environment with dscore-testing-hosts.

Every such run imports this module, so it imports nothing but pytest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ds_testing_hosts.lab import Lab


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    """``lab("a", "b", ssh=True)``: a `ds_testing_hosts.lab.Lab`, ended after the test; skips where
    there can be none.
    """
    from ds_testing_hosts.lab import Lab, unavailable

    if reason := unavailable():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda *names, **options: stack.enter_context(Lab(*names, **options))
