"""
Journeys through the source, `make journeys`: how many functions, in how many files, one thing passes on its way.

Each is traced in a small run of first_run in one process; phases from their second step on, when everything is built:

- rate: a learning rate, from an override to the update: functions that take or return the number, its text, or a list,
  tuple or dict that holds it, until the first update; and all that run in the phases `lr` and `optimizer`.
- batch: a batch to its gradients: functions that run in the phase `forward_backward`.
- checkpoint: functions that run in the phase `checkpoint`, and in the threads that it starts.

Counted are distinct functions of graph, components and kernels that are entered. Generator expressions, lambdas, and
methods that attrs writes are not. `make journeys ONLY=batch` lists the functions.
"""

import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import drawloom

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tuple(str(ROOT / name) + "/" for name in ("graph", "components", "kernels"))
RATE = 0.00123457  # a number that nothing else has
PHASES = {"lr": "rate", "optimizer": "rate", "forward_backward": "batch", "checkpoint": "checkpoint"}
SMALL = ("model.num_hidden_layers=1", "batch.global_size=2", "batch.micro_size=2")
STEPS = ("trainer.steps=4", "checkpoint.every=1", "evaluate.every=100", "trainer.on_finish=[]")


class Tracer:
    """
    A profile function of all threads, and the functions of each journey, by file.

    `phase` is the journey of the phase that runs; `arrived`, whether a phase of `rate` has run.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.threads: dict[threading.Thread, str | None] = {}
        self.phase: str | None = None
        self.arrived = False
        self.paths: dict[CodeType, str | None] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace this thread and those that start in the block, each on the journey of the thread that starts it."""
        start = threading.Thread.start

        def noted(thread: threading.Thread) -> None:
            self.threads[thread] = self._journey()
            start(thread)

        with mock.patch.object(threading.Thread, "start", noted):
            threading.setprofile(self)
            sys.setprofile(self)
            try:
                yield
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    def _journey(self) -> str | None:
        return self.threads.get(threading.current_thread(), self.phase)

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        if event in ("call", "return") and (path := self._path(frame.f_code)):
            name = frame.f_code.co_qualname
            if event == "call" and (journey := self._journey()) is not None:
                self.found[journey][path].add(name)
            if not self.arrived and any(map(_holds, frame.f_locals.values() if event == "call" else [result])):
                self.found["rate"][path].add(name)

    def _path(self, code: CodeType) -> str | None:
        """The path of a function of ours in the repository, else None."""
        if code not in self.paths:
            real = os.path.realpath(code.co_filename)
            counted = real.startswith(FOLDERS) and not code.co_name.startswith("<")
            self.paths[code] = os.path.relpath(real, ROOT) if counted else None
        return self.paths[code]


def _holds(value: object) -> bool:
    """Whether a value is the rate, or its text, or a container of it."""
    if type(value) is dict:
        return any(map(_is_rate, value.values()))
    return any(map(_is_rate, value)) if type(value) in (list, tuple) else _is_rate(value)  # type: ignore[call-overload]


def _is_rate(value: object) -> bool:
    return value == RATE if type(value) is float else type(value) is str and str(RATE) in value


def trace(folder: Path) -> dict[str, dict[str, set[str]]]:
    """The functions of each journey by file, from a run in a folder."""
    tracer = Tracer()
    with tracer.tracing():
        recipe = drawloom.Recipe.load("first_run", *SMALL, *STEPS, f"run.folder={folder}", f"optimizer.lr={RATE}")
        with recipe.open() as run:
            for node, journey in PHASES.items():
                _follow(run[node], journey, tracer)
            run["trainer"].run()
    return tracer.found


def _follow(phase: Any, journey: str, tracer: Tracer) -> None:
    """Set the tracer's phase while a phase runs, from its second step on."""
    kind = type(phase)
    done: list[int] = []

    def run_phase(self: Any, step: Any) -> None:
        tracer.phase = journey if done else None
        try:
            kind.run_phase(self, step)
        finally:
            tracer.phase = None
            tracer.arrived = tracer.arrived or journey == "rate"
            done.append(step.index)

    phase.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "run_phase": run_phase})


def main() -> None:
    """Print the figures of all journeys, or the functions of one."""
    with tempfile.TemporaryDirectory() as folder:
        found = trace(Path(folder) / "run")
    for journey in ("rate", "batch", "checkpoint"):
        files = found[journey]
        print(f"{journey:<12}{sum(map(len, files.values())):>5} functions in {len(files)} files")
        if journey in sys.argv[1:]:
            for path, names in sorted(files.items()):
                print(f"    {path}  {len(names)}  {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
