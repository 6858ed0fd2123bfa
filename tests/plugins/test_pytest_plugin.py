"""The pytest plugin."""

import os
import subprocess
import sys
from pathlib import Path

from support.blocks import ROOT, read_files

TEST = """
import os
import pytest
from drawloom.testing import BrokenContractError

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

PROCESSES = set()

@pytest.mark.parametrize("number", [1, 2])
def test_a_mean_breaks_the_contract(prove, number):
    with pytest.raises(BrokenContractError, match="mean_loss breaks a contract: Loss: Loss and weight are scalars"):
        prove("mean_loss", imports="mean_loss.py")
    PROCESSES.update(prove.keywords["prover"].call(1, os.getpid))

def test_proofs_share_processes():
    assert len(PROCESSES) == 1
"""


def test_the_plugin_offers_the_testing_api_as_fixtures(tmp_path: Path) -> None:
    """
    Tests of other projects have `drawloom_build` and the other fixtures after loading the plugin.

    `prove` raises for a broken contract like the function, and keeps its processes.
    """
    (tmp_path / "test_it.py").write_text(TEST, "utf-8")
    loss = read_files(ROOT / "docs/proving.md")["my_lab/short_first.py"]
    (tmp_path / "mean_loss.py").write_text(loss.replace("weights.double().sum()", "weights.double().mean()"), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "drawloom.pytest_plugin", "."]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    # The plugin may be installed.
    alone = {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr
