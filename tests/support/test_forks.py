"""Tests run in forked processes."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
COUNTED = """
import os
from pathlib import Path

import pytest

Path("imported").open("a").write(f"{__file__}\\n")

@pytest.fixture(scope="module")
def pid():
    with Path("fixtures").open("a") as file:
        file.write(f"{os.getpid()} set up\\n")
    yield os.getpid()
    with Path("fixtures").open("a") as file:
        file.write(f"{os.getpid()} torn down\\n")

def test_one(pid):
    assert pid == os.getpid()

def test_two(pid):
    assert pid == os.getpid()
"""


def _run(folder: Path, **files: str) -> "subprocess.CompletedProcess[str]":
    """Run files of tests in two processes."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "support.forks", "--forks", "2"]
    environment = {"PYTHONPATH": TESTS, "PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_files_run_in_processes_that_import_nothing_again(tmp_path: Path) -> None:
    """Every file is imported once, runs in one process with one module fixture, and its failures are printed."""
    failing = "def test_fails():\n    print('about seven')\n    assert 7 == 8\n"
    skipped = "import pytest\n\n@pytest.mark.skip\ndef test_skipped(): ...\n"
    done = _run(tmp_path, a=COUNTED, b=failing, c=skipped, d=COUNTED)
    assert done.returncode == 1 and "1 failed, 4 passed, 1 skipped" in done.stdout, done.stdout
    assert "assert 7 == 8" in done.stdout and "about seven" in done.stdout
    assert len((tmp_path / "imported").read_text().splitlines()) == 2
    lines = (tmp_path / "fixtures").read_text().splitlines()
    assert sorted(line.partition(" ")[2] for line in lines) == ["set up", "set up", "torn down", "torn down"]


def test_a_process_that_dies_fails_the_session(tmp_path: Path) -> None:
    """The message names the test and the exit code."""
    done = _run(tmp_path, a="import os\n\ndef test_dies():\n    os._exit(3)\n", b=COUNTED)
    assert done.returncode == 1 and "ended with code 3 in test_a.py::test_dies" in done.stdout, done.stdout
