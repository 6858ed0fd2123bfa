"""
The events of a run, as the log of rank 0 tells them: starts, kills, resumes, stops, skipped steps, warnings.

A process that was killed writes nothing: what tells of it is that the next one begins although it had not ended.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import attrs

from drawloom.components.report.metrics import lines_of

LOG = "log/rank-0.log"
MOST_EVENTS = 200
LONGEST_TEXT = 500  # letters of an event

Kind = Literal["started", "resumed", "killed", "stopped", "skipped", "recipe", "warning", "error", "ended"]

# Of several ranks each line has the rank's place in brackets (`listeners.logging`).
LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (?:\[[\w, ]+\] )?([A-Z]+) (drawloom[.\w]*): (.*)")
STEP = re.compile(r"step (\d{1,15})/(\d{1,15})(  | skipped: )")
STOPPED = re.compile(r"stopped by .* after (?:step (\d{1,15})|training)")
RESUMED = re.compile(r"resuming after step (\d{1,15})")
ENDS = ("trained ", "best    ", "results ")
LABELS = 8  # letters of a label in the header, with the spaces behind it


@attrs.frozen
class LogEvent:
    """An event: when, of which kind, after which step (0 before the first), and what the log says."""

    time: str
    kind: Kind
    step: int
    text: str


@attrs.define(eq=False)
class RunLog:
    """
    What a log tells: events, the first and the last ones if there are many; the header of the newest process.

    `omitted` events are left out, `skipped` counts all skipped steps, `starts` all processes, and `lost` the steps, as
    far as the log has them, that were done before a resume from an earlier one. `running` says that the newest process
    has not written that it ended. `first` and `last` are the times of the first and the last message.
    """

    events: list[LogEvent] = attrs.field(factory=list)
    header: dict[str, str] = attrs.field(factory=dict)
    omitted: int = 0
    skipped: int = 0
    starts: int = 0
    lost: int = 0
    first: str = ""
    last: str = ""
    running: bool = False
    step: int = 0
    total: int = 0
    _time: str = ""
    _in_header: bool = False

    def put(self, line: str) -> None:
        """Read a line; one without a time continues the message before."""
        if (found := LINE.match(line)) is None:
            if self._in_header:
                self._label(line)
            return
        self._in_header = False
        time, level, logger, text = found.groups()
        self.first, self.last = self.first or time, time
        if logger == "drawloom.run" and level == "INFO":
            self._run_line(time, text)
        elif skip := STEP.match(text):
            self._count(skip)
            self.skipped += 1
            self._event(time, "skipped", text)
        elif level in ("WARNING", "ERROR", "CRITICAL"):
            self._event(time, "warning" if level == "WARNING" else "error", text)
            # a failure of the run itself; other errors, such as a tracker's, do not end it
            self.running &= not (level == "ERROR" and logger == "drawloom.distributed")
        if self.running and logger == "drawloom.run":  # the next process reads its data before it writes its header
            self._time = time

    def _run_line(self, time: str, text: str) -> None:
        if step := STEP.match(text):
            self._count(step)
        elif text.startswith("run     "):
            self._start(time, text)
        elif text.startswith("memory  "):
            self._label(text)
        elif found := RESUMED.match(text):
            self.lost += max(0, self.step - int(found[1]))
            self.step = int(found[1])
            self._event(time, "resumed", text)
        elif found := STOPPED.match(text):
            self.step, self.running = int(found[1] or self.step), False
            self._event(time, "stopped", text)
        elif text.startswith(ENDS):
            self.running = False
            self._event(time, "ended", text)
        elif ": the recipe changed: " in text:
            self._event(time, "recipe", text.partition(": ")[2])

    def _start(self, time: str, text: str) -> None:
        if self.running:
            self.end_without_word()
        self.running, self.starts, self.header, self._in_header = True, self.starts + 1, {}, True
        self._label(text)
        if self.starts == 1:
            self._event(time, "started", "the first process of the run")

    def end_without_word(self) -> None:
        """Note that the newest process did not write that it ended."""
        self.running = False
        what = f"the last line in the log is of step {self.step}" if self.step else "it was before the first step"
        self._event(self._time, "killed", f"killed, or failed with an error that only the terminal shows; {what}")

    def end(self, time: str, step: int) -> None:
        """Note that training has ended with this step: the report is written before the log says it."""
        self.running, self.step, self.last = False, step, time
        self._event(time, "ended", f"all {step:,} steps are done")

    def _label(self, line: str) -> None:
        label, text = line[:LABELS].strip(), line[LABELS:].strip()
        if label and text and len(self.header) < 20:
            self.header[label] = text[:LONGEST_TEXT]

    def _count(self, found: re.Match[str]) -> None:
        self.step, self.total = int(found[1]), int(found[2])

    def _event(self, time: str, kind: Kind, text: str) -> None:
        self.events.append(LogEvent(time, kind, self.step, text[:LONGEST_TEXT]))
        if len(self.events) > MOST_EVENTS:
            del self.events[MOST_EVENTS // 2]
            self.omitted += 1


def read_log(folder: Path) -> RunLog:
    """The log of rank 0 of a run folder; UserError if the file is a link or not a regular file."""
    return parse_log(line.decode("utf-8", "replace").rstrip("\n") for line in lines_of(folder / LOG))


def parse_log(lines: Iterable[str]) -> RunLog:
    """Read every line."""
    log = RunLog()
    for line in lines:
        log.put(line)
    return log
