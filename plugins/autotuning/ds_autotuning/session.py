"""One tuning from the command line to its results: config, profile, space, trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_command_kit.environment import environment
from ds_command_kit.overrides import VARIABLE, encode, held
from ds_command_kit.show import CommandError

from ds_autotuning.config import Autotuning
from ds_autotuning.records import Forecast, Profile, Result, Row, Status
from ds_autotuning.search.candidates import (
    BATCH,
    Candidate,
    Judge,
    checked,
    documented_bytes,
    micro_batches,
    replicas,
    without_output,
)
from ds_autotuning.search.forecast import Room, forecast, largest_micro_batch, make_profile, room_of
from ds_autotuning.search.space import (
    MICRO,
    Setting,
    Space,
    changes,
    installed_models,
    marked,
    merged,
    space_of,
)
from ds_autotuning.search.tuner import Tuning, tune
from ds_autotuning.trials.experiments import Experiments, Limits
from ds_autotuning.trials.launching import Launch, at
from ds_core.config import ConfigSource, Trait, read_config
from ds_core.errors import ConfigError, DSError, UsageError

if TYPE_CHECKING:
    from ds_core.setup.compose import Composition

SECTION = "autotuning"


@dataclass(frozen=True)
class Outcome:
    """What a tuning found.

    config: to train with: whole where a file was given, else what differs from the script's.
    """

    rows: Sequence[Row]
    best: Row | None
    config: Mapping[str, Any]
    launch: Launch
    section: Autotuning
    profile: Profile


def tune_script(
    launch: Launch,
    config: str = "",
    *,
    anew: bool = False,
    changed: Mapping[str, Any] = {},
    say: Callable[[str], None] = lambda _: None,
    heard: Callable[[Row, Row | None, Autotuning], None] = lambda *_: None,
) -> Outcome:
    """Tune the script that `launch` starts.

    config: a file, where the script's arguments name none.
    anew: forget the trials of before.
    changed: keys of the section ``autotuning`` to replace.
    say: called with what is done.
    heard: called with each row as it comes, the best, and the section.

    Raises DSError for a config that is refused, and where the script does not run as it is.
    """
    path = config or launch.config
    # A script with a config of its own gets the overrides in each run.
    given = {} if path else dict(held())
    whole = {key: value for key, value in given.items() if "." not in key}
    base = read_config(path).overridden().raw if path else whole
    given.pop(SECTION, None)
    with environment({VARIABLE: None}):
        section = _section(base, changed)
        base.pop(SECTION, None)
        if section.enabled and path:
            checked({**base, **dict.fromkeys(BATCH)} if _open_batch(base) else base)
        session = _Session(launch, bool(path), base, section, anew or section.overwrite, say, heard)
        session.given = given
        try:
            return session()
        finally:
            session.experiments.close()


def _section(base: Mapping[str, Any], changed: Mapping[str, Any]) -> Autotuning:
    """The section, checked; a user who calls the tuner has enabled it."""
    given = base.get(SECTION) or {}
    if not isinstance(given, Mapping):
        given = {}
    raw = {**given, **changed, "enabled": True, "metric_path": None}
    section = checked({SECTION: raw, MICRO: 1}).config.section(SECTION)
    assert isinstance(section, Autotuning)
    return section


def _open_batch(base: Mapping[str, Any]) -> bool:
    return any(base.get(key) == "auto" for key in BATCH)


class _Session:
    """Holds what one tuning works on."""

    def __init__(
        self,
        launch: Launch,
        has_file: bool,
        base: dict[str, Any],
        section: Autotuning,
        anew: bool,
        say: Callable[[str], None],
        heard: Callable[[Row, Row | None, Autotuning], None],
    ) -> None:
        self.launch = launch
        self.has_file = has_file
        self.base = base
        self.given: Mapping[str, Any] = {}
        self.section = section
        self.say = say
        self.heard = heard
        memory = int(section.host_memory_gb * 1e9) if section.host_memory_gb else 0
        # What is searched may change from one start to the next: trials stay comparable. What is
        # measured may not.
        measured = (
            "start_profile_step",
            "end_profile_step",
            "metric",
            "host_memory_gb",
            "device_memory_gb",
            "mp_size",
        )
        self.experiments = Experiments(
            Path(section.exps_dir).expanduser(),
            {
                "command": launch.words(),
                "config": base,
                "measured": {key: getattr(section, key) for key in measured},
            },
            Limits(section.trial_seconds, memory),
            anew=anew,
        )

    def __call__(self) -> Outcome:
        section = self.section
        profile = self._profile()
        world = int(profile.facts["world"])
        if not self.has_file:
            with environment({VARIABLE: encode(self.given)}):
                found = ConfigSource(profile.facts.get("config", {}), "the profile").overridden()
            self.base = found.raw
            self.base.pop(SECTION, None)
        mapped = section.arg_mappings or {}
        space = space_of(
            marked(installed_models(self.base)),
            self.base,
            world=world,
            facts=profile.facts,
            fast=section.fast,
            own=section.space,
            mapped=mapped,
        )
        room = room_of(profile, section.device_memory_gb, section.host_memory_gb)
        judge = Judge(
            self.base, space, world, section, self._forecasts(profile, world), room.refuses
        )
        self.say(_about(profile, space))
        tuning = Tuning(
            section,
            space,
            sizes=lambda setting: self._sizes(judge, profile, room, setting),
            judge=judge,
            run=self._run,
            given=self._given(judge, space),
        )
        tuning.say = lambda row: self.heard(row, tuning.best, section)
        tune(tuning)
        best = judge(tuning.best.setting).config if tuning.best is not None else None
        differs = {**self.given, **changes(self.base, best or {})}
        config = dict(best or {}) if self.has_file else differs
        launch = (
            self.launch
            if tuning.best is None
            else self.launch.with_flags(_flat(best or {}, mapped), mapped)
        )
        return Outcome(tuning.rows, tuning.best, config, launch, section, profile)

    # -- the model ---------------------------------------------------------------------------------

    def _profile(self) -> Profile:
        """Of two short runs, with micro-batches of different sizes; or what the config knows of the
        model.
        """
        known = self.section.model_info
        if known is not None and known.num_params is not None and not known.profile:
            if self.launch.world is None:
                raise CommandError(
                    "autotuning.model_info.num_params skips the run that tells how many processes "
                    "there are; give "
                    "--nproc (and --nnodes)"
                )
            facts = {
                "world": self.launch.world,
                "hidden_size": known.hidden_size,
                "layers": known.num_layers,
            }
            return Profile(known.num_params, known.num_params, facts=facts)
        low = self.section.min_train_micro_batch_size_per_gpu
        self.say("measuring the model")
        first = self._profile_run(1, low, {})
        if first.status is Status.OUT_OF_MEMORY:  # as the documents do, with everything divided
            zero = self.base.get("zero_optimization") or {}
            first = self._profile_run(1, low, {"zero_optimization": {**zero, "stage": 3}})
        if first.status is not Status.DONE:
            log = self.experiments.folder / "profile_1" / "log"
            raise UsageError(
                f"the script does not run as it is, so it cannot be tuned: {first.reason}; see "
                f"{log}"
            )
        profile = make_profile([self._file(1)])
        # A process's memory grows in large steps, so on a host the two sizes are further apart.
        larger = low * (8 if profile.facts.get("device") == "cpu" else 2)
        larger = min(larger, self.section.max_train_micro_batch_size_per_gpu)
        if larger > low and self._profile_run(2, larger, {}).status is Status.DONE:
            profile = make_profile([self._file(1), self._file(2)])
        return profile

    def _file(self, number: int) -> Path:
        return self.experiments.folder / f"profile_{number}" / "profile.json"

    def _profile_run(self, number: int, micro: int, more: Mapping[str, Any]) -> Result:
        setting = {"train_batch_size": None, MICRO: micro, "gradient_accumulation_steps": 1, **more}
        return self._start(
            f"profile_{number}", setting, setting, {**setting, "model_info": {"profile": True}}
        )

    # -- trials ------------------------------------------------------------------------------------

    def _run(self, number: int, name: str, candidate: Candidate) -> Result:
        assert candidate.config is not None
        overrides = changes(self.base, candidate.config)
        return self._start(f"{number:03d}_{name}", overrides, candidate.config, candidate.setting)

    def _start(
        self,
        name: str,
        overrides: Mapping[str, Any],
        config: Mapping[str, Any],
        setting: Mapping[str, Any],
    ) -> Result:
        """Run one trial with top-level keys of the config replaced.

        setting: what tells it from others.
        """
        section = self.section
        own = {
            "enabled": True,
            "metric": section.metric,
            "metric_path": str(self.experiments.folder / name / "result.json"),
            "start_profile_step": section.start_profile_step,
            "end_profile_step": section.end_profile_step,
            "host_memory_gb": section.host_memory_gb,
            "device_memory_gb": section.device_memory_gb,
        }
        if "model_info" in setting:
            own["model_info"] = setting["model_info"]
        mapped = section.arg_mappings or {}
        launch = self.launch.with_flags(_flat(config, mapped), mapped)
        more = {**self.given, **without_output(self.base), **overrides, SECTION: own}
        return self.experiments.run(name, launch, more, setting)

    def _sizes(self, judge: Judge, profile: Profile, room: Room, setting: Setting) -> Sequence[int]:
        """Micro-batches worth a trial in a stage; the least alone where that is ruled out, so that
        the reason is reported.
        """
        section = self.section
        own = self.section.space.get(MICRO, ())
        low = section.min_train_micro_batch_size_per_gpu
        try:
            chosen, dp = replicas(
                merged(judge.base, setting, judge.space), judge.world, section.mp_size
            )
            most = section.max_train_micro_batch_size_per_gpu
            if profile.modules:
                most = largest_micro_batch(profile, chosen, judge.world, room, most)
        except DSError:
            return [low]
        return micro_batches(section, judge.base, dp, most, own) or [low]

    def _forecasts(self, profile: Profile, world: int) -> Callable[[Composition], Forecast | None]:
        if profile.modules:
            return lambda chosen: forecast(profile, chosen, world)

        def documented(chosen: Composition) -> Forecast:
            core = chosen.config.core
            half = core.fp16.enabled or core.bf16.enabled
            divided = (Trait.PARTITIONS_STATES, Trait.PARTITIONS_GRADIENTS, Trait.RELEASES_WEIGHTS)
            stage = sum(map(chosen.config.has, divided))
            mp_size = self.section.mp_size
            states = documented_bytes(
                profile.parameters, stage, max(world // mp_size, 1), bool(half), mp_size
            )
            return Forecast(states, 0.0, states=states)

        return documented

    def _given(self, judge: Judge, space: Space) -> Setting | None:
        """The config as given, where it says its batch, can be run, and is within the bounds of
        what may be tried.
        """
        setting = {
            d.key: d.values[0] if d.implied else at(self.base, d.key) for d in space.dimensions
        }
        own = {d.key for d in space.dimensions if not d.implied}
        setting = {k: v for k, v in setting.items() if k not in own or v not in (None, "auto")}
        if any(self.base.get(key) == "auto" for key in BATCH):
            return None
        try:
            _, dp = replicas(merged(self.base, setting, space), judge.world, self.section.mp_size)
            batch = checked({**merged(self.base, setting, space)}).batch(dp)
        except ConfigError:
            return None
        low = self.section.min_train_micro_batch_size_per_gpu
        high = self.section.max_train_micro_batch_size_per_gpu
        return {**setting, MICRO: batch.micro} if low <= batch.micro <= high else None


def _flat(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The values of some dotted keys."""
    return {key: at(config, key) for key in keys}


def _about(profile: Profile, space: Space) -> str:
    keys = ", ".join([d.key for d in space.dimensions] + [MICRO])
    return (
        f"a model of {profile.parameters:,} parameters on {profile.facts['world']} ranks; "
        "tuning "
        f"{keys}"
    )
