"""The pictures of docs/how-it-works.md: ``python docs/_site/drawings.py`` writes docs/images/*.svg.

Buckets are laid out by `ds_zero.buckets.layout` and ranks by `ds_core.mesh`, as in a run. Colours are
readable on white and on black, and the ground is transparent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ds_zero.buckets.layout import Layout

from ds_core.entries import Axis
from ds_core.mesh import plan_mesh

IMAGES = Path(__file__).parents[1] / "images"

INK = "#6e7781"
COLOURS = ("#2f6feb", "#1a7f37", "#bf5a00", "#8250df")
"""Of parameters and of groups; white text is readable on each."""
IDLE = "#8b949e"

Drawing = tuple[int, int, str, Sequence[str]]
"""Width, height, what a reader who cannot see it is told, and the elements."""


def box(x: float, y: float, width: float, height: float, fill: str, label: str = "") -> str:
    """A filled box with a white label in its middle."""
    middle = f'x="{x + width / 2:g}" y="{y + height / 2 + 4:g}" text-anchor="middle" fill="#fff"'
    text = f"<text {middle}>{label}</text>" if label else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}"/>'
        + text
    )


def frame(x: float, y: float, width: float, height: float, colour: str = INK) -> str:
    """An empty box with a dashed edge."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="none" '
        f'stroke="{colour}" stroke-dasharray="4 3"/>'
    )


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """A label."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}">{words}</text>'


def arrow(x: float, top: float, bottom: float) -> str:
    """An arrow that points down."""
    return (
        f'<path d="M{x:g} {top:g}V{bottom:g}m-4 -6l4 6l4 -6" fill="none" stroke="{INK}" '
        'stroke-width="1.5"/>'
    )


def draw_bucket() -> Drawing:
    """Three parameters in one flat buffer, cut over four ranks."""
    names, sizes, world = ("w1: 4 x 5", "b1: 5", "w2: 3 x 3"), (20, 5, 9), 4
    layout = Layout.of(sizes, world)
    left, cell = 90, 14
    ends = [start + size for start, size in zip(layout.offsets, sizes, strict=True)]
    parts = [text(0, 34, "parameters")]
    parts += [
        box(left + start * cell + 4 * at, 20, size * cell, 22, COLOURS[at], name)
        for at, (start, size, name) in enumerate(zip(layout.offsets, sizes, names, strict=True))
    ]
    parts += [arrow(left + 250, 50, 70), text(left + 262, 65, "one after the other")]
    parts += [text(0, 96, "bucket")]
    parts += [
        box(left + start * cell, 80, size * cell, 24, COLOURS[at])
        for at, (start, size) in enumerate(zip(layout.offsets, sizes, strict=True))
    ]
    parts += [box(left + ends[-1] * cell, 80, (layout.total - ends[-1]) * cell, 24, IDLE)]
    parts += [text(left + layout.total * cell, 120, "padding", "end"), text(0, 160, "shards")]
    for rank in range(world):
        x = left + rank * (layout.shard_numel * cell + 10) - 15
        parts += [frame(x - 3, 143, layout.shard_numel * cell + 6, 30)]
        parts += [text(x + layout.shard_numel * cell / 2, 190, f"rank {rank}", "middle")]
        first, last = rank * layout.shard_numel, (rank + 1) * layout.shard_numel
        for at, (start, end) in enumerate(
            zip((*layout.offsets, ends[-1]), (*ends, layout.total), strict=True)
        ):
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                fill = COLOURS[at] if at < len(sizes) else IDLE
                width = (stop - begin) * cell
                parts += [box(x + (begin - first) * cell, 146, width, 24, fill, f"{stop - begin}")]
    told = "Three parameters are put into one bucket, which is cut into four equal shards."
    return 700, 200, told, [*parts, arrow(left + 290, 112, 136)]


def draw_stage3() -> Drawing:
    """What one rank does in two layers under stage 3, from left to right."""
    rows = {"communicate": 40, "compute": 80, "layer 1": 130, "layer 2": 164}
    parts = [text(0, y + 17, name) for name, y in rows.items()]
    parts += [text(0, 122, "full weights of")]
    gather, forward, backward, reduce = COLOURS
    steps = [
        ("communicate", 90, 60, gather, "gather 1"),
        ("communicate", 154, 60, gather, "gather 2"),
        ("compute", 154, 70, forward, "forward 1"),
        ("compute", 228, 70, forward, "forward 2"),
        ("compute", 312, 96, backward, "backward 2"),
        ("communicate", 336, 60, gather, "gather 1"),
        ("communicate", 412, 84, reduce, "reduce-sc. 2"),
        ("compute", 412, 96, backward, "backward 1"),
        ("communicate", 512, 84, reduce, "reduce-sc. 1"),
        ("compute", 604, 50, INK, "step"),
    ]
    parts += [box(x, rows[row], width, 24, fill, label) for row, x, width, fill, label in steps]
    held = [("layer 1", 90, 134), ("layer 2", 154, 254), ("layer 1", 336, 172)]
    parts += [box(90, rows[row] + 4, 564, 3, IDLE) for row in ("layer 1", "layer 2")]
    parts += [box(x, rows[row], width, 24, gather) for row, x, width in held]
    parts += [text(224, 204, "release 1", "middle"), text(408, 204, "release 2", "middle")]
    parts += [
        text(508, 204, "release 1", "middle"),
        text(90, 24, "forward"),
        text(312, 24, "backward"),
    ]
    parts += [
        f'<path d="M{x} 30V192" stroke="{INK}" stroke-dasharray="2 3"/>' for x in (224, 408, 508)
    ]
    told = (
        "In forward and in backward a layer's weights are gathered before it runs and released "
        "after it; gradients are reduce-scattered while backward goes on with the layer before."
    )
    return 700, 214, told, parts


def draw_mesh() -> Drawing:
    """Eight ranks as pipeline stages, data-parallel replicas and tensor-parallel parts."""
    axes = [Axis("tp", 2), Axis("pp", 2, outermost=True)]
    places = [plan_mesh(axes, 8, rank).coord for rank in range(8)]
    parts = [text(110, 20, "pp 0: the first layers"), text(390, 20, "pp 1: the last layers")]
    for rank, place in enumerate(places):
        x, y = 110 + 280 * place["pp"] + 106 * place["tp"], 50 + 56 * place["dp"]
        parts += [box(x, y, 96, 34, COLOURS[place["dp"]], f"rank {rank}")]
    for stage in range(2):
        x = 110 + 280 * stage
        parts += [frame(x - 10, 28, 222, 130)]
        parts += [text(x + 48 + 106 * part, 44, f"tp {part}", "middle") for part in range(2)]
    parts += [text(90, 72 + 56 * copy, f"dp {copy}", "end") for copy in range(2)]
    parts += [text(110, 182, f"the mesh of rank 0: {plan_mesh(axes, 8, 0).describe()}")]
    told = "Eight ranks: two pipeline stages, in each two data-parallel rows of two tensor-parallel ranks."
    return 640, 192, told, parts


def draw_inside_dp() -> Drawing:
    """Eight data-parallel ranks, of which pairs share experts."""
    axes = [Axis("ep", 2, inside="dp")]
    meshes = [plan_mesh(axes, 8, rank) for rank in range(8)]
    left, step = 130, 62
    parts = [text(0, 42, "rank")]
    for rank, here in enumerate(meshes):
        parts += [box(left + step * rank, 26, 54, 26, INK, f"{rank}")]
        experts = "0-3" if here.coord["ep"] == 0 else "4-7"
        parts += [box(left + step * rank, 92, 54, 26, COLOURS[here.coord["ep"]], experts)]
    parts += [frame(left - 5, 20, 8 * step + 2, 38), text(0, 110, "its experts")]
    parts += [text(left, 14, "dp: all eight average the gradients of everything else")]
    for group in sorted({tuple(here.ranks("ep")) for here in meshes}):
        parts += [frame(left + step * group[0] - 5, 86, step * len(group) - 2, 38)]
    parts += [text(left, 78, "ep: a pair holds all experts, and sends tokens to each other")]
    same = [tuple(meshes[rank].ranks("edp")) for rank in range(2)]
    parts += [
        text(
            left,
            144 + 18 * at,
            f"edp: ranks {', '.join(map(str, group))} sum the gradients of experts {names}",
        )
        for at, (group, names) in enumerate(zip(same, ("0-3", "4-7"), strict=True))
    ]
    told = "Eight data-parallel ranks; in each pair the ranks hold different experts."
    return 640, 172, told, parts


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "bucket": draw_bucket,
    "stage3": draw_stage3,
    "mesh": draw_mesh,
    "mesh-inside-dp": draw_inside_dp,
}


def svg(drawing: Drawing) -> str:
    """The file of a drawing."""
    width, height, told, parts = drawing
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="sans-serif" font-size="12">',
            f"<title>{told}</title>",
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(svg(draw()))
