"""The picture of the idea, in README.md and docs/index.md: keys of a config, the packages that serve
them, and where in a training step these work.

python docs/_site/idea_picture.py   # writes docs/images/idea.svg

Boxes have a background of their own and other text is grey, so it reads on white and on black.
"""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).parents[1] / "images" / "idea.svg"
GREY = "#7d8590"
PHASES = ("forward", "backward", "reduce gradients", "update weights", "after the step")
ROWS = (
    ('"zero_optimization": {"stage": 3}', "dscore-zero", (0, 1, 2, 3), "#2f81f7"),
    ('"activation_checkpointing": {...}', "dscore-activation-checkpointing", (0, 1), "#a371f7"),
    ('"optimizer": {"type": "Muon"}', "dscore-optimizers", (3,), "#d29922"),
    ('"checkpoint": {...}', "dscore-checkpoint", (4,), "#3fb950"),
    ('"wandb": {"enabled": true}', "dscore-monitor-wandb", (4,), "#3fb950"),
    ('"goal": {"loss": 0.5}', "your package", (4,), "#f778ba"),
)
"""Key, package, the phases in which it works, colour."""

TOP, STEP, HEIGHT = 64, 46, 30
KEY, PACKAGE, PHASE = 16, 318, 648
WIDTHS = {KEY: 262, PACKAGE: 246, PHASE: 180}
PHASE_STEP = 57


def box(x: int, y: int, text: str, colour: str, code: bool = False) -> str:
    """A rounded box with its text."""
    font = "mono" if code else "sans"
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTHS[x]}" height="{HEIGHT}" rx="6" fill="#f6f8fa" '
        f'stroke="{colour}" stroke-width="2"/>\n'
        f'<text class="{font}" x="{x + 10}" y="{y + 20}" fill="#1f2328">{text}</text>'
    )


def line(x: int, y: int, to_x: int, to_y: int, colour: str) -> str:
    """A curve from the right side of a box to the left side of another."""
    middle = (x + to_x) // 2
    return (
        f'<path d="M{x} {y} C{middle} {y} {middle} {to_y} {to_x} {to_y}" fill="none" '
        f'stroke="{colour}" stroke-width="2" opacity="0.75"/>'
    )


def draw() -> str:
    """The whole picture."""
    lines, boxes = [], []
    for x, title in (
        (KEY, "keys of ds_config.json"),
        (PACKAGE, "packages that serve them"),
        (PHASE, "one training step (the core)"),
    ):
        boxes.append(
            f'<text class="sans" x="{x}" y="42" fill="{GREY}" font-weight="bold">{title}</text>'
        )
    for number, phase in enumerate(PHASES):
        boxes.append(box(PHASE, TOP + number * PHASE_STEP, phase, GREY))
    for number, (key, package, phases, colour) in enumerate(ROWS):
        y = TOP + number * STEP
        middle = y + HEIGHT // 2
        lines.append(line(KEY + WIDTHS[KEY], middle, PACKAGE, middle, colour))
        for phase in phases:
            at = TOP + phase * PHASE_STEP + HEIGHT // 2
            lines.append(line(PACKAGE + WIDTHS[PACKAGE], middle, PHASE, at, colour))
        escaped = key.replace('"', "&quot;")
        boxes += [box(KEY, y, escaped, colour, code=True), box(PACKAGE, y, package, colour)]
    height = TOP + len(ROWS) * STEP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 16 844 {height - 16}" width="844" '
        'role="img" aria-label="Keys of a config, the packages that serve them, and the phases of '
        'a training step in which they work">\n'
        "<style>.sans{font:13px system-ui,sans-serif}.mono{font:12px ui-monospace,monospace}</style>"
    )
    return "\n".join([head, *lines, *boxes, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw())
