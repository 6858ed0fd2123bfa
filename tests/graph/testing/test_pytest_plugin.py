"""The pytest plugin."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

TEST = """
def test_fixtures(drawloom_build, drawloom_fake, drawloom_check_port, drawloom_opened, tmp_path):
    from support.shop.ports import Store
    build, fake, opened = drawloom_build, drawloom_fake, drawloom_opened
    page = build("pages.plain", package="support.shop", title="x", store=fake(Store))
    assert page.title == "x"
    drawloom_check_port("stores.memory", Store, package="support.shop")
    disk = opened(build("stores.disk", package="support.shop", folder=tmp_path))
    assert disk.journal == ["open"]
    open(tmp_path / "journal", "w").close()
    JOURNALS.append(disk.journal)

JOURNALS = []

def test_open_nodes_are_closed():
    assert JOURNALS == [["open", "close"]]
"""


def test_the_plugin_offers_the_testing_api_as_fixtures(tmp_path: Path) -> None:
    """Tests of other projects have `drawloom_build` and the other fixtures after loading the plugin."""
    (tmp_path / "test_it.py").write_text(TEST, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "drawloom.graph.testing.pytest_plugin", "."]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    alone = {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # the plugin may be installed
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
