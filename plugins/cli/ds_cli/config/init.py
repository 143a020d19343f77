"""``dscore config init``: a first config for a model and the devices that there are.

What a stage needs is the planner's answer (``dscore plan``, which asks the hook ``ds_planners``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from ds_command_kit.show import CommandError, say_error


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path(
        "ds_config.json"
    ),
    model: Annotated[
        str, typer.Option("--for", metavar="SIZE", help="Parameters of the model, such as 7B.")
    ] = "",
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes, one per device.")] = None,
    device_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB.")
    ] = "",
    host_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of one host; without limit if left out.")
    ] = "",
    disk: Annotated[
        str, typer.Option(metavar="FOLDER", help="A folder on a fast disk, for offload.")
    ] = "",
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="What the model computes in.")
    ] = "bf16",
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples per process and forward.")] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-4,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write a first config: answer a few questions, or give --for, --gpus and --device-memory.

    Exit codes:
      0: the file is written
      1: nothing fits
      2: an answer is missing or wrong, or the file is there already

    Examples:
      dscore config init
      dscore config init --for 7B --gpus 8 --device-memory 80GB
      dscore config init small.json --for 100M --gpus 2 --device-memory 8GB
    """
    _check_target(file, force)
    if not model:
        if not sys.stdin.isatty():
            raise CommandError(
                "there is no terminal to ask on; give the answers, as in: dscore config init --for "
                "7B --gpus 8 --device-memory 80GB"
            )
        model = typer.prompt("How many parameters has the model", default="7B")
        gpus = typer.prompt("On how many devices", default=gpus or 1, type=int)
        device_memory = typer.prompt("Memory of one device", default=device_memory or "80GB")
        micro_batch = typer.prompt("Samples per device and forward", default=micro_batch, type=int)
        lr = typer.prompt("Learning rate", default=lr, type=float)
    if gpus is None or not device_memory:
        raise CommandError(
            "--for needs --gpus and --device-memory, as in: --gpus 8 --device-memory 80GB"
        )
    answer = _plan(model, gpus, device_memory, host_memory, precision)
    config, reasons = _write(answer, precision, micro_batch, lr, disk)
    _check(config, gpus)
    _save(config, file, force)
    typer.echo(f"wrote {file}")
    for key, reason in reasons:
        typer.echo(f"  {key}: {reason}")
    typer.echo(f"next: dscore config check {file} --world {gpus}")


def _check_target(file: Path, force: bool) -> None:
    """Raises CommandError where `file` may not be written."""
    if file.exists() and not force:
        raise CommandError(f"{file} is there already; name another file, or give --force")
    if not file.absolute().parent.is_dir():
        raise CommandError(f"{file}: there is no folder {str(file.absolute().parent)!r}")


def _save(config: dict[str, Any], file: Path, force: bool) -> None:
    text = json.dumps(config, indent=2) + "\n"
    try:
        # Another process may have written the file since it was looked for.
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from error


def _plan(
    model: str, gpus: int, device_memory: str, host_memory: str, precision: str
) -> dict[str, Any]:
    """What ``dscore plan`` recommends; it also checks the sizes. Ends with 1 where nothing fits."""
    words = ["plan", f"--params={model}", f"--world={gpus}", f"--device-memory={device_memory}"]
    words += [f"--dtype={precision}", "--json"]
    words += [f"--host-memory={host_memory}"] if host_memory else []
    command = [sys.executable, "-m", "ds_cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().removeprefix("dscore: ")
        raise CommandError(said.replace("--params", "--for")) from None
    if answer["recommended"] is None:
        say_error(
            f"{gpus} x {device_memory}: {answer['reason']}; give more devices, more memory or a "
            "smaller model"
        )
        raise typer.Exit(1)
    return answer


def _write(
    answer: dict[str, Any], precision: str, micro_batch: int, lr: float, disk: str
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The config, and why each of its keys is there."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
    }
    reasons = [
        (
            "train_micro_batch_size_per_gpu",
            "raise it until memory is full; activations are not planned",
        ),
        ("gradient_accumulation_steps", "raise it for a larger batch in the same memory"),
    ]
    if precision != "fp32":
        config[precision] = {"enabled": True}
        reasons.append(
            (precision, "the model computes in 16 bits, the optimizer keeps fp32 weights")
        )
    config["gradient_clipping"] = 1.0
    reasons.append(("gradient_clipping", "the default; torch's own loop does not clip"))
    config["optimizer"] = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}}
    reasons.append(("optimizer", "torch's weight decay; the learning rate is a guess to be tuned"))
    found = answer["choices"][answer["recommended"]]
    if found["stage"]:
        zero: dict[str, Any] = {"stage": found["stage"]}
        for part in ("optimizer", "parameters"):
            if part in found["offload"]:
                key = "offload_param" if part == "parameters" else "offload_optimizer"
                zero[key] = {"device": "cpu"}
                if "disk" in found["offload"]:
                    if not disk:
                        raise CommandError(f"{answer['reason']}; give --disk FOLDER")
                    zero[key] = {"device": "nvme", "nvme_path": disk}
        config["zero_optimization"] = zero
    reasons.append(("zero_optimization" if found["stage"] else "no stage", answer["reason"]))
    return config, reasons


def _check(config: dict[str, Any], gpus: int) -> None:
    """Raises ConfigError where ``config check`` would refuse it."""
    from ds_core.setup.compose import compose

    chosen = compose(config)
    chosen.batch(chosen.mesh(gpus).size("batch"))
