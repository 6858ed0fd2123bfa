"""The page in a real browser, headless Chromium, without a network."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from drawloom.components.report.page import render_page
from drawloom.components.report.run_record import Drawings, read_run_record

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1600,1200"),
    *("--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom"),
)


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, such as Debian's package of this name")
def test_curves_are_drawn_and_markup_is_not_run(tmp_path: Path) -> None:
    """Metrics have a plot with a line per run; a name containing a script stays text."""
    evil = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    rows = [{"step": step, "loss": 1 / step, **({evil: 1.0} if step % 5 else {})} for step in range(1, 4000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    runs = [read_run_record(tmp_path, name, Drawings()) for name in ("one", evil)]
    (tmp_path / "report.html").write_text(render_page(runs), "utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    plots = re.findall(r'<svg class="plot".*?</svg>', done.stdout, re.S)
    assert len(plots) == 2
    assert plots[0].count('class="line"') == plots[0].count('class="band"') == 2 and "NaN" not in plots[0]
    assert "1 more metric" in done.stdout and "<title>broken" not in done.stdout and "<img" not in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr  # neither an error of the script nor of the policy


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, such as Debian's package of this name")
def test_page_fits_400_pixels(tmp_path: Path) -> None:
    """In a frame of 400 pixels the page does not scroll sideways; wide tables scroll on their own."""
    lock = '[run]\nname = "a"\nseed = {}\n\n[optimizer]\nlr = {}\n'
    runs = []
    for lr in (0.001, 0.0003):
        for seed in (0, 1):
            run = tmp_path / f"lr={lr},seed={seed}"
            run.mkdir()
            (run / "recipe.lock.toml").write_text(lock.format(seed, lr), "utf-8")
            (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n', "utf-8")
            runs.append(read_run_record(run, run.name, Drawings()))
    (tmp_path / "report.html").write_text(render_page(runs), "utf-8")
    frame = """<iframe id="frame" src="report.html" width="400" height="900" style="border:0"></iframe><script>
    onload = () => {
      const page = frame.contentDocument.documentElement
      document.title = `scrolls by ${page.scrollWidth - page.clientWidth}`
    }</script>"""
    (tmp_path / "frame.html").write_text(frame, "utf-8")
    flags = (*FLAGS, "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}")
    command = [str(CHROMIUM), *flags, (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "<title>scrolls by 0</title>" in done.stdout, done.stdout[:300]
