"""``dscore tune``: find the fastest settings of a script, and run it with them where that is asked
for.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from ds_command_kit.overrides import encode
from ds_command_kit.show import CommandError, say_error

from ds_autotuning.trials.launching import parse_words

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning
    from ds_autotuning.records import Row
    from ds_autotuning.session import Outcome


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN_OPTIONS]... SCRIPT [ARGS]...",
        help="Options of `dscore run`, the script and its own arguments.",
    ),
]
Config = Annotated[
    str,
    typer.Option(metavar="FILE", help="The config, where the script's arguments do not name it."),
]
Trials = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Instead of autotuning.tuner_num_trials.")
]
Anew = Annotated[
    bool, typer.Option("--anew", help="Forget the trials of before (autotuning.overwrite).")
]
ThenRun = Annotated[
    bool, typer.Option("--then-run", help="Then run the script with what was found.")
]


def tune(
    words: Words = None,
    config: Config = "",
    trials: Trials = None,
    anew: Anew = False,
    then_run: ThenRun = False,
) -> None:
    """Find the fastest settings of a script by short trials, each in processes of its own.

    Options of the tuner come first, then all as for `dscore run`. Started again, it resumes with the
    trials that are missing.

    Exit codes:
      0: the fastest settings are written, and the command for them is printed
      1: the config or a plugin is wrong
      2: wrong usage, or no trial could be measured

    With --then-run the code is that of the run.

    Examples:
      dscore tune --world 2 train.py --deepspeed_config ds_config.json
      dscore tune --trials 10 --then-run train.py
    """
    from ds_autotuning.report import write_results
    from ds_autotuning.session import tune_script

    if not words:
        raise CommandError(
            "which script? As in: dscore tune --nproc 2 train.py --deepspeed_config ds_config.json"
        )
    launch = parse_words(words)
    if not launch.is_command and not launch.is_module and not Path(launch.script).is_file():
        raise CommandError(
            f"no such script: {launch.script!r}; options of the tuner come before those of "
            "dscore run"
        )
    changed = {} if trials is None else {"tuner_num_trials": trials}
    outcome = tune_script(launch, config, anew=anew, changed=changed, say=say_error, heard=_tell)
    folder = Path(outcome.section.results_dir).expanduser().absolute()
    best = outcome.best
    if best is None:
        why = {row.result.reason: row.name for row in reversed(outcome.rows)}
        reasons = "; ".join(f"{name}: {reason}" for reason, name in list(why.items())[-3:])
        raise CommandError(f"no trial was measured: {reasons or 'there is nothing to try'}")
    optimal = folder / "ds_config_optimal.json"
    command = outcome.launch.final(optimal)
    write_results(
        folder, outcome.rows, best, dict(outcome.config), command, outcome.section, outcome.profile
    )
    say_error(f"best: {_said(best, outcome.section)}; see {folder}/summary.txt")
    typer.echo(shlex.join(command))
    if then_run:
        raise typer.Exit(_run(outcome, optimal))


def tune_first(wanted: str, words: list[str]) -> int:
    """``dscore run --autotuning tune|run``: the command ``tune`` with the other words; its exit
    code.
    """
    then = ["--then-run"] if wanted == "run" else []
    code = typer.main.get_command(app)(
        [*then, *words], prog_name="dscore tune", standalone_mode=False
    )
    return code if isinstance(code, int) else 0


def _tell(row: Row, best: Row | None, section: Autotuning) -> None:
    head = (
        f"trial {row.number} of at most {section.tuner_num_trials}" if row.number else "not tried"
    )
    say_error(f"{head}: {_said(row, section)}{' (the best so far)' if row is best else ''}")


def _said(row: Row, section: Autotuning) -> str:
    units = {"throughput": "samples/s", "latency": "s per step", "flops": "flops/s per device"}
    value = row.result.metric(section.metric)
    what = (
        f"{row.result.status.value}: {row.result.reason}"
        if value is None
        else f"{value:.4g} {units[section.metric]}"
    )
    return f"{row.name}  {what}"


def _run(outcome: Outcome, optimal: Path) -> int:
    """``dscore run`` with what was found; its exit code."""
    launch = outcome.launch.with_config(str(optimal))
    more = {} if outcome.launch.config else {"DS_CONFIG_OVERRIDES": encode(outcome.config)}
    command = [sys.executable, "-m", "ds_cli", "run", *launch.words()]
    return subprocess.run(command, env={**os.environ, **more}, check=False).returncode


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(
    tune
)
