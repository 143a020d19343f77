"""What a checkpoint of ours has besides what every checkpoint has: names of shared tensors, buffers
that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ds_run_state import RunState, persistent_buffers
from torch import Tensor, nn

from ds_checkpoint.folder.tensorfile import as_bytes


def class_name(thing: object) -> str:
    """Module and name of the class of `thing`."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def shared_names(module: nn.Module) -> dict[str, str]:
    """Further name -> first name, for every tensor of the state dict that several modules share."""
    # Tensors hash by identity: two names of one tensor meet here.
    first: dict[Tensor, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        first.setdefault(tensor, name)
    tensors = module.state_dict(keep_vars=True).items()
    return {
        n: first[t] for n, t in tensors if isinstance(t, Tensor) and t in first and first[t] != n
    }


def digests(module: nn.Module) -> dict[str, str]:
    """A hash of every persistent buffer."""
    found = {}
    for name, buffer in persistent_buffers(module).items():
        found[name] = hashlib.blake2b(
            as_bytes(buffer.detach().cpu().contiguous()), digest_size=16
        ).hexdigest()
    return found


def differing(
    run: RunState, buffers: Mapping[str, Tensor], everyone: Sequence[Mapping[str, str]]
) -> dict[str, Tensor]:
    """Those of this rank's `buffers` that are not as on the rank that stores them; everyone: the
    digests of each rank.

    Running statistics see each rank's own data; without them a resumed rank would not be what it
    was.
    """
    mine = everyone[run.rank]
    return {n: b for n, b in buffers.items() if mine[n] != everyone[run.first_holder(n)].get(n)}
