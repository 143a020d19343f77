"""The config section ``checkpoint_object`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option


class ObjectConfig(Section):
    """How object stores are written and read. Credentials come from the environment alone."""

    timeout: float = option(60.0, "Seconds that one request may take.", gt=0)
    give_up_after: float = option(
        300.0, "Seconds after which a request that fails is not repeated any more.", gt=0
    )
    part_size: int = option(
        1 << 24, "Bytes of one request; larger files are written and read in parts.", ge=5 << 20
    )
    requests: int = option(8, "Requests under way at once, of each rank.", ge=1)
    lease_seconds: float = option(
        30.0,
        "Seconds without a sign of life after which another job may save to the same place.",
        ge=1,
    )
    spool: bool = option(
        True,
        "Keep what was verified in temporary files (in TMPDIR) until it is loaded, so that nothing "
        "is fetched twice.",
    )
