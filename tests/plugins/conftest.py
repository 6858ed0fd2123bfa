"""Example plugins are separate projects; the tests in this folder install them and run their tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

collect_ignore = ["perplexity", "tempered", "weight_noise"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, str]]:
    """Return a function that installs a plugin offline, and returns the environment variables to use it."""

    def install(plugin: Path) -> dict[str, str]:
        target = tmp_path_factory.mktemp("site")
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(plugin)]
        subprocess.run(command, check=True, capture_output=True)
        paths = os.pathsep.join([str(target), str(ROOT / "src")])
        return {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}

    return install
