"""The drawing: SVG that stands on its own."""

from __future__ import annotations

WIDTH, HEIGHT = 400, 200


def draw(steps: int, batch: int) -> str:
    """Samples over steps: a straight line."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{steps * batch} samples in {steps} steps</title>"
        f'<line x1="0" y1="{HEIGHT}" x2="{WIDTH}" y2="0" stroke="currentColor" stroke-width="2"/></svg>'
    )
