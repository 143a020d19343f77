"""How much memory a setting will take per rank, forecast before it is run.

Model states are those of `ds_memory` (dscore-zero: the arithmetic of ``dscore plan``) for what one rank
computes with. The rest (activations, temporaries, what the process takes by itself) was measured: a
line in the micro-batch size.

[Note: what is not exact] Tensor parallelism is taken to divide every matrix and the activations
evenly, sequence parallelism the activations, a pipeline the repeated blocks (a stage keeps as many
micro-batches at a time as there are stages). What blocks keep that are computed again was counted
in the profile run, as for the policy "all"; where it could not be, one block's activations are
taken, which is the least that they can keep.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_command_kit.memory import memory_of

from ds_autotuning.records import Forecast, Parameter, Profile, read_json
from ds_autotuning.trials.profile import build, fit_line
from ds_core.config import Trait
from ds_core.errors import UsageError
from ds_core.setup.compose import compose

if TYPE_CHECKING:
    from ds_core.mesh import Mesh
    from ds_core.setup.compose import Composition

GIB = 2**30
HIDDEN = "***"
"""What stands for a secret in a config that is shown."""
ADAM = 2
"""States per parameter that are assumed where nobody tells memory, as documented."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that one rank may take."""

    device: float = math.inf
    host: float = math.inf

    def refuses(self, needed: Forecast) -> str:
        """Why `needed` does not fit; "" where it does."""
        if needed.device > self.device:
            return (
                f"needs {_gib(needed.device)} of the device ({_gib(needed.states)} of model "
                "states, "
                f"{_gib(needed.activations)} of activations, {_gib(needed.fixed)} of others); "
                "there are "
                f"{_gib(self.device)}"
            )
        if needed.host > self.host:
            return f"needs {_gib(needed.host)} of host memory per rank; there are {_gib(self.host)}"
        return ""


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


def room_of(profile: Profile, device_gb: float | None = None, host_gb: float | None = None) -> Room:
    """What the profile found free, or what the config says (10^9 bytes)."""
    return Room(
        device_gb * 1e9
        if device_gb is not None
        else float(profile.facts.get("device_memory") or math.inf),
        host_gb * 1e9
        if host_gb is not None
        else float(profile.facts.get("host_memory") or math.inf),
    )


# -- model states ----------------------------------------------------------------------------------


def states_of(profile: Profile, chosen: Composition, world: int) -> Mapping[str, float]:
    """Bytes of model states per rank on "device", "host" and "disk", at their peak.

    world: all ranks.

    Raises UsageError or ConfigError where ranks do not divide as the config says.
    """
    from ds_core.precision import cast_module, make_precision

    mesh = chosen.mesh(world)
    module = build(profile, _share(profile, mesh), _elsewhere(profile, mesh))
    cast_module(module, make_precision(chosen.config, chosen.plugins))
    found, complete = memory_of(chosen, module, mesh.size("dp"))
    if complete:
        return found
    count = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    half = weights < 4 * count
    # Weights, gradients, and in 16-bit modes fp32 masters with their gradients; Adam's moments in
    # fp32.
    found["device"] += weights + trained * ((2 + 8 if half else 4) + 4 * ADAM)
    return found


def _size(mesh: Mesh, axis: str) -> int:
    return mesh.size(axis) if axis in mesh.names else 1


def _share(profile: Profile, mesh: Mesh) -> Any:
    """``(name, parameter) -> shape`` of what a rank has: matrices divided by tp, experts that are
    stacked by ep.
    """
    tp = _size(mesh, "tp")
    ep = _size(mesh, "ep")
    experts = int(profile.facts.get("experts") or 0)

    def shape(name: str, parameter: Parameter) -> tuple[int, ...]:
        whole = parameter.shape
        if not whole:
            return whole
        stacked = experts > 1 and len(whole) > 2 and whole[0] == experts
        by = (ep if stacked else 1) * (tp if len(whole) > 1 else 1)
        return (-(-whole[0] // by), *whole[1:])

    return shape


def _elsewhere(profile: Profile, mesh: Mesh) -> list[str]:
    """Paths of modules that other ranks have: blocks of other stages, experts of other ranks that
    stand in a list.
    """
    absent = []
    pp = _size(mesh, "pp")
    ep = _size(mesh, "ep")
    if pp > 1:
        blocks = _block_paths(profile)
        absent += blocks[-(-len(blocks) // pp) :]
    if ep > 1:
        lists = [row.path for row in profile.modules if row.path.rpartition(".")[2] == "experts"]
        for path in lists:
            each = [r.path for r in profile.modules if r.path.rpartition(".")[0] == path]
            absent += each[-(-len(each) // ep) :] if len(each) > 1 else []
    return absent


def _block_paths(profile: Profile) -> list[str]:
    from ds_run_state.blocks import repeated_blocks

    return list(repeated_blocks(build(profile)))


# -- all of it -------------------------------------------------------------------------------------


def forecast(profile: Profile, chosen: Composition, world: int) -> Forecast:
    """What `chosen` takes on each of `world` ranks. Without a measured line, model states alone.

    Raises UsageError or ConfigError where ranks do not divide as the config says.
    """
    mesh = chosen.mesh(world)
    states = states_of(profile, chosen, world)
    micro = chosen.batch(mesh.size("batch")).micro
    on_host = profile.facts.get("device") == "cpu"
    fixed = profile.fixed_bytes or 0.0
    activations = (
        (profile.activation_bytes_per_sample or 0.0) * micro * _kept(profile, chosen, mesh)
    )
    held = states["device"] + (states["host"] if on_host else 0.0)
    device = held + activations + fixed
    host = device if on_host else states["host"] + float(profile.facts.get("host_base") or 0.0)
    return Forecast(device, host, states["disk"], held, activations, fixed)


def _kept(profile: Profile, chosen: Composition, mesh: Mesh) -> float:
    """The part of a micro-batch's activations that one rank keeps."""
    part = 1.0 / (_size(mesh, "tp") * _size(mesh, "sp"))
    before = profile.facts.get("recomputes", False)
    if recomputes(chosen) and not before:
        layers = int(profile.facts.get("layers") or 0)
        part *= float(profile.facts.get("recomputed_part") or (1.0 / layers if layers > 1 else 1.0))
    return part


def recomputes(chosen: Composition) -> bool:
    """Whether the config asks for blocks that are computed again in backward."""
    return chosen.config.has(Trait.RECOMPUTES)


def largest_micro_batch(
    profile: Profile, chosen: Composition, world: int, room: Room, most: int
) -> int:
    """The largest micro-batch size up to `most` that fits into `room` by the forecast; 0: not even
    one sample.
    """
    now = forecast(profile, chosen, world)
    each = now.activations / chosen.batch(chosen.mesh(world).size("batch")).micro
    on_host = profile.facts.get("device") == "cpu"
    left = min(room.device, room.host if on_host else math.inf) - now.states - now.fixed
    if left < 0 or (not on_host and now.host > room.host):
        return 0
    return most if each <= 0 or left >= most * each else math.floor(left / each)


# -- from profile runs -----------------------------------------------------------------------------


def make_profile(files: Sequence[Path]) -> Profile:
    """One profile of what several profile runs wrote, with micro-batches of different sizes.

    Model states follow from the config of each run, and are subtracted from its peak. Raises
    UsageError where no file can be read.
    """
    read = [(path, data) for path in files if (data := read_json(path)) is not None]
    if not read:
        raise UsageError(f"no profile of the model was written: {', '.join(map(str, files))}")
    profiles = [Profile.from_json(data) for _, data in read]
    first = profiles[0]
    device: list[tuple[float, float]] = []
    host: list[float] = []
    seconds: dict[int, float] = {}
    peaks: dict[str, Any] = {}
    for profile in profiles:
        chosen = compose(_without_secrets(profile.facts["config"]))
        states = states_of(profile, chosen, int(profile.facts["world"]))
        on_host = profile.facts["device"] == "cpu"
        seconds.update(profile.seconds)
        for micro, peak in profile.facts["peaks"].items():
            peaks[micro] = peak
            held = states["device"] + (states["host"] if on_host else 0.0)
            device.append((float(micro), float(peak["device"]) - held))
            host.append(
                float(peak["host"]) - states["host"] - (states["device"] if on_host else 0.0)
            )
    fixed, slope = fit_line(device)
    again = recomputes(compose(_without_secrets(first.facts["config"])))
    return dataclasses.replace(
        first,
        activation_bytes_per_sample=slope if len(device) > 1 else None,
        fixed_bytes=fixed,
        seconds=seconds,
        facts={**first.facts, "peaks": peaks, "host_base": max(host), "recomputes": again},
    )


def _without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that was shown, without sections in which a value is hidden: they would not be
    valid.
    """
    return {key: value for key, value in config.items() if HIDDEN not in json.dumps(value)}
