"""The loss picture of the README, from the CSV files of a run of `make quickstart`:

python docs/_site/loss_picture.py runs/gpt docs/images/quickstart.svg
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

GREY = "#7d8590"  # readable on white and on black


def draw(run: Path, target: Path, half: int = 250) -> None:
    """Draw the loss over steps; a mark where the run was resumed."""
    with open(run / "Train_Samples_train_loss.csv", newline="") as file:
        rows = [(float(samples), float(loss)) for samples, loss in list(csv.reader(file))[1:]]
    losses = [loss for _, loss in rows]
    smooth = [
        sum(losses[max(0, at - 9) : at + 1]) / len(losses[max(0, at - 9) : at + 1])
        for at in range(len(losses))
    ]
    rcParams["svg.hashsalt"] = "ds_core"
    figure = Figure(figsize=(7, 2.8), layout="tight")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#2f81f7", alpha=0.3, linewidth=0.8)
    axes.plot(steps, smooth, color="#2f81f7", linewidth=1.8)
    axes.axvline(half, color=GREY, linewidth=0.8, linestyle="--")
    axes.text(half + 6, max(losses) * 0.9, "resumed from its checkpoint", color=GREY, fontsize=9)
    axes.set_xlabel("step (64 samples of 64 bytes)", color=GREY)
    axes.set_ylabel("loss, nats per byte", color=GREY)
    axes.tick_params(colors=GREY)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    axes.margins(x=0.01)
    figure.savefig(target, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
