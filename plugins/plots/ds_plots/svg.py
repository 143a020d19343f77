"""An SVG document of rectangles, lines and texts, drawn in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

Point = tuple[float, float]


class Svg:
    """A document on a white ground.

    Coordinates are pixels from the top left corner; of numbers six digits are written. Attributes
    of SVG are keyword arguments with an underscore for the hyphen: ``text_anchor="end"``. Texts and
    values of attributes are escaped.
    """

    def __init__(self, width: float, height: float, font_size: int = 12) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'font-family="sans-serif" font-size="{font_size}">'
        ]
        self._add("rect", width=width, height=height, fill="white")

    def rect(
        self, x: float, y: float, width: float, height: float, **attributes: float | str
    ) -> None:
        """A rectangle, by its top left corner."""
        self._add("rect", x=x, y=y, width=width, height=height, **attributes)

    def text(self, x: float, y: float, text: str, **attributes: float | str) -> None:
        """A line of text.

        y: of its base line.
        """
        self._lines.append(f"{_open('text', x=x, y=y, **attributes)}>{escape(text, False)}</text>")

    def polyline(self, points: Iterable[Point], **attributes: float | str) -> None:
        """Straight lines from point to point, not filled."""
        self._add("polyline", points=_format_points(points), fill="none", **attributes)

    def polygon(self, points: Iterable[Point], **attributes: float | str) -> None:
        """The area inside straight lines from point to point and back to the first."""
        self._add("polygon", points=_format_points(points), **attributes)

    def __str__(self) -> str:
        return "\n".join([*self._lines, "</svg>"]) + "\n"

    def _add(self, name: str, **attributes: float | str) -> None:
        self._lines.append(f"{_open(name, **attributes)}/>")


def _open(name: str, **attributes: float | str) -> str:
    """The beginning of an element, without its last bracket."""
    words = [name]
    for key, value in attributes.items():
        text = escape(value) if isinstance(value, str) else f"{value:g}"
        words.append(f'{key.replace("_", "-")}="{text}"')
    return "<" + " ".join(words)


def _format_points(points: Iterable[Point]) -> str:
    return " ".join(f"{_format_place(x)},{_format_place(y)}" for x, y in points)


def _format_place(value: float) -> str:
    # A tenth of a pixel is finer than the eye; all digits would make a curve several times longer.
    return str(value) if isinstance(value, int) else f"{value:.1f}"
