"""The state of an elastic run at its store: what none of us wrote ends by name, however deep it
is."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{", b"3", b'{"round": {}}'])
def test_what_is_no_state_is_named(text: bytes) -> None:
    from ds_cli.multi_host.elastic import _from_json
    from torch.distributed.elastic.rendezvous.api import RendezvousStateError

    with pytest.raises(RendezvousStateError, match="is not the state of a dscore run"):
        _from_json(text)
