"""Child processes that fork a warm process."""

import os
import signal
import subprocess
import sys

from drawloom import __version__
from support.forked_children import fork_children
from support.processes import run_ranks


def _run_children() -> tuple[list[str], list[int], bool]:
    """Return the outputs and exit codes of children, and whether one was ended by a signal in a session of its own."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a child has the default again
    fork_children()
    commands = ["-m", "drawloom", "--version"], ["-m", "drawloom", "fly"], ["-c", "import os; print(os.environ['A'])"]
    done = [
        subprocess.run([sys.executable, *words], env={"A": "seven"}, capture_output=True, text=True, timeout=60)
        for words in commands
    ]
    with subprocess.Popen([sys.executable, "-m", "drawloom", "mcp"], stdin=-1, start_new_session=True) as child:
        is_leader = os.getsid(child.pid) == child.pid
        child.kill()
    return [child.stdout + child.stderr for child in done], [child.returncode for child in done], is_leader


def test_children_behave_as_started_ones() -> None:
    """Outputs, exit codes, environment and session are a started Python's; another program is started as usual."""
    [(outputs, codes, is_leader)] = run_ranks(_run_children, 1, variables=False)
    assert codes == [0, 2, 0] and is_leader
    assert __version__ in outputs[0] and "no command 'fly'" in outputs[1] and outputs[2] == "seven\n"
