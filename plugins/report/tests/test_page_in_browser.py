"""The page in a real browser: its script runs, texts stay texts, it fits a phone, has its colours,
and prints.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ds_report.page.page import page
from ds_report.run import read_run

pytestmark = pytest.mark.slow
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
Browse = Callable[..., str]
EVIL = "<script>document.title='pwned'</script>\"'&"


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Browse:
    """``browse(file, *options)``: what a headless Chromium prints."""
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    place = tmp_path_factory.mktemp("browser")

    def run(file: Path, *options: str) -> str:
        fixed = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={place}",
        ]
        command = [CHROMIUM, *fixed, "--virtual-time-budget=3000", *options, file.as_uri()]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=180, cwd=place, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, write_record: Callable[..., Path]) -> Path:
    """A page of two runs; the texts of one of them try to break out."""
    folder = tmp_path_factory.mktemp("page")
    evil = write_record(folder / "evil", name=EVIL, last="failed", **{EVIL: EVIL})
    runs = [read_run(write_record(folder / "plain", 3000), "plain"), read_run(evil, EVIL)]
    path = folder / "page.html"
    path.write_text(page(runs), encoding="utf-8")
    return path


def drawn(dom: str) -> list[str]:
    return re.findall(r'<path class="c\d[^"]*" d="(M[^"]+)"', dom) or re.findall(
        r'<path d="(M[^"]+)" class="c\d', dom
    )


PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const fire = (node, kind, extra = {}) => node.dispatchEvent(Object.assign(new Event(kind, { bubbles: true }), extra));
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect(), said = {};
  fire(plot, "pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 5 });
  said.tip = plot.querySelector(".tip").textContent;
  const first = () => document.querySelector(".lines path:last-child").getAttribute("d");
  const ticks = () => document.querySelector(".chart .xs").textContent;
  const changes = (selector, change) => {
    const before = first() + ticks(), input = document.querySelector(selector);
    change(input); fire(input, "input");
    return before !== first() + ticks();
  };
  said.smooth = changes("#smooth", (i) => { i.value = 0.9; });
  said.log = changes("#log", (i) => { i.checked = true; });
  said.time = changes("input[value=hours]", (i) => { i.checked = true; });
  said.hidden = changes(".toggle", (i) => { i.checked = false; });
  said.wide = document.documentElement.scrollWidth > innerWidth;
  said.width = innerWidth;
  said.title = document.title;
  const out = document.createElement("pre");
  out.id = "said"; out.textContent = JSON.stringify(said); document.body.append(out);
}, 300));
</script>
"""


def test_its_script_runs_and_a_name_stays_a_name(browse: Browse, file: Path) -> None:
    dom = browse(file, "--dump-dom", "--window-size=1280,900")
    assert "<title>2 training runs</title>" in dom
    assert '<div class="tools">' in dom, (
        "the script has not run: the content security policy does not know it"
    )
    assert html.escape(EVIL, quote=False) in dom
    lines = drawn(dom)
    assert len(lines) > 10 and "NaN" not in "".join(lines)


@pytest.mark.parametrize("width", [390, 1280])
def test_settings_and_values(browse: Browse, file: Path, width: int) -> None:
    import json

    text = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", file.read_text(encoding="utf-8")
    )
    inner = file.with_name(f"probe{width}.html")
    inner.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    frame = file.with_name(f"frame{width}.html")  # a window has a least width; a frame has none
    frame.write_text(
        f'<body><iframe id="f" src="{inner.name}" '
        f'style="width:{width}px;height:900px;border:0"></iframe>'
        "<script>setTimeout(() => { document.title = 'done'; document.body.append("
        "document.getElementById('f').contentDocument.getElementById('said').textContent); }, "
        "1500)</script>"
    )
    dom = browse(frame, "--dump-dom", "--window-size=1400,1000", "--allow-file-access-from-files")
    said = json.loads(html.unescape(re.search(r"</script>(\{.*\})</body>", dom, re.DOTALL)[1]))  # type: ignore[index]
    assert re.match(r"step 1,(49|50)\d.*plain0.0026\d", said["tip"]), said["tip"]
    assert [said[k] for k in ("smooth", "log", "time", "hidden")] == [True] * 4
    assert (said["wide"], said["width"], said["title"]) == (False, width, "2 training runs")


def test_light_dark_and_print(browse: Browse, file: Path, tmp_path: Path) -> None:
    from PIL import Image

    corner = []
    for scheme in (1, 0):  # light, dark
        shot = tmp_path / f"{scheme}.png"
        browse(
            file,
            f"--screenshot={shot}",
            "--window-size=1280,1400",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
        image = Image.open(shot).convert("RGB")
        corner.append(sum(image.getpixel((2, 2))))  # type: ignore[arg-type]
        assert len(image.getcolors(1 << 24) or ()) > 200, "nothing is drawn"
    assert corner[0] > 3 * 230 and corner[1] < 3 * 40
    browse(file, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6
