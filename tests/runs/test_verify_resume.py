"""`drawloom verify-resume`, which checks that a recipe resumes bit-exactly."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from support.processes import run_ranks
from support.runs import Outcome, command, write_corpus

SOURCE = str(Path(__file__).parents[2] / "src")
TESTS = str(Path(__file__).parents[1])


def _verify(folder: Path, *words: str, path: str = "") -> tuple[int, str]:
    write_corpus(folder)
    [outcome] = run_ranks(_run_command, 1, folder, words, path, not path, timeout=300, variables=False)
    return outcome.code, outcome.text


def _run_command(folder: Path, words: Sequence[str], path: str = "", forks: bool = False) -> Outcome:
    """Run the command; its runs import modules of `path` before these sources, if it does not fork them."""
    os.environ |= {"PYTHONPATH": f"{path}:{SOURCE}:{TESTS}", "OMP_NUM_THREADS": "1"}
    tempfile.tempdir = str(folder)
    return command(folder, ("verify-resume", "tiny.toml", "--steps", "60", *words), None, forks=forks)


def test_a_recipe_resumes_bit_exactly(tmp_path: Path) -> None:
    """Metrics and state of every step equal an uninterrupted run's, and no files are left."""
    code, text = _verify(tmp_path)
    assert code == 0, text
    assert "60 steps without interruption, and 30 steps, a kill after step " in text
    assert "bit-identical: 60 steps, " in text
    assert not list(tmp_path.glob("verify-resume-*"))


def _run_and_terminate(folder: Path) -> Outcome:
    """Run the command and send SIGTERM once its first run has started."""

    def end() -> None:
        while not list(folder.glob("verify-resume-*/straight.txt")):
            time.sleep(0.0002)  # so short that the run's process is being started
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    return _run_command(folder, ())


def test_a_signal_kills_the_run_and_removes_its_folder(tmp_path: Path) -> None:
    """After a signal no process trains on and no files are left."""
    write_corpus(tmp_path)
    [outcome] = run_ranks(_run_and_terminate, 1, tmp_path, timeout=60, variables=False)
    assert outcome.code == 143 and "Traceback" not in outcome.text
    assert not list(tmp_path.glob("verify-resume-*"))
    end = time.monotonic() + 10  # a killed process takes a moment to end
    while (left := _list_training(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def _list_training(folder: Path) -> list[bytes]:
    """List the command lines of processes that train below a folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has just ended
            lines.append(path.read_bytes())
    return [line for line in lines if f"run.folder={folder}".encode() in line]


@pytest.mark.soak
def test_two_ranks_resume_bit_exactly(tmp_path: Path) -> None:
    """A run of two ranks under torchrun resumes bit-exactly."""
    code, text = _verify(tmp_path, "--ranks", "2", "batch.micro_size=2")
    assert code == 0, text


@pytest.mark.soak
@pytest.mark.parametrize(("mutation", "tensor"), [("no_moments", "stages/"), ("no_randomness", "randomness/")])
def test_state_that_is_not_restored_is_named(tmp_path: Path, mutation: str, tensor: str) -> None:
    """The message names the first step after the kill and its first differing tensor."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'run' in sys.orig_argv:\n    from support.mutations import MUTATIONS, put\n"
        f"    MUTATIONS['{mutation}']()\n"
        "    import random\n    from drawloom.components.gradients.synchronize import Synchronize\n"
        "    real = Synchronize.run_phase\n"
        "    def noisy(self, step):\n        random.random()\n        real(self, step)\n"
        "    noisy.__annotations__ = real.__annotations__\n    put(Synchronize, 'run_phase', noisy)\n"
    )
    code, text = _verify(tmp_path, path=str(tmp_path))
    assert code == 1, text
    assert "step 31 differs: " in text and tensor in text
