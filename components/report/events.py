"""
A run's events, read from rank 0's log: starts, kills, resumes, stops, skipped steps, warnings.

A killed process does not log its end. It is recognized by the next process's start.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import attrs

from drawloom.components.report.metrics import read_lines

LOG = "log/rank-0.log"
MAX_EVENTS = 200
MAX_TEXT_LENGTH = 500  # characters of an event

Kind = Literal["started", "resumed", "killed", "stopped", "skipped", "recipe", "warning", "error", "ended"]

# With several ranks, lines contain the rank's mesh indices in brackets (`listeners.logging`).
LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (?:\[[\w, ]+\] )?([A-Z]+) (drawloom[.\w]*): (.*)")
STEP = re.compile(r"step (\d{1,15})/(\d{1,15})(  | skipped: )")
STOPPED = re.compile(r"stopped by .* after (?:step (\d{1,15})|training)")
ENDS = re.compile(r"the run ends after step (\d{1,15}): ")
RESUMED = re.compile(r"resuming after step (\d{1,15})")
SUMMARY_LABELS = ("trained ", "best    ", "results ")
LABEL_WIDTH = 8  # characters of a label in the header, with the spaces after it


@attrs.frozen
class LogEvent:
    """An event: its time, its kind, the step before it (0 before the first step), and the text in the log."""

    time: str
    kind: Kind
    step: int
    text: str


@attrs.define(eq=False)
class RunLog:
    """
    Events in a log, without the middle ones if there are many, and the newest process's header.

    `omitted` counts left-out events, `skipped` skipped steps, `starts` processes, and `lost` the logged steps repeated
    after a resume. `running` is true until the newest process logs its end. `first` and `last` are the first and the
    last message's times.
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
    _alive_at: str = ""  # when the newest process was last known to run, for the event of its kill
    _in_header: bool = False

    def update_from_line(self, line: str) -> None:
        """Update the events with a line; a line without a time continues the previous message."""
        if (match := LINE.match(line)) is None:
            if self._in_header:
                self._add_header_line(line)
            return
        self._in_header = False
        time, level, logger, text = match.groups()
        self.first, self.last = self.first or time, time
        if logger == "drawloom.run" and level == "INFO":
            self._update_from_run_message(time, text)
        elif skip := STEP.match(text):
            self._set_step_and_total(skip)
            self.skipped += 1
            self._add_event(time, "skipped", text)
        elif level in ("WARNING", "ERROR", "CRITICAL"):
            self._add_event(time, "warning" if level == "WARNING" else "error", text)
            # only a failure of the run itself ends it, not an error of a tracker, for example
            self.running &= not (level == "ERROR" and logger == "drawloom.distributed")
        if self.running and logger == "drawloom.run":  # other messages may be the next process's, before its header
            self._alive_at = time

    def _update_from_run_message(self, time: str, text: str) -> None:
        """Update the events with an INFO line from the run: a step, start, resume, stop or end."""
        if step := STEP.match(text):
            self._set_step_and_total(step)
        elif text.startswith("run     "):
            # Note a new process; if the earlier one did not end, note its kill
            if self.running:
                self.add_kill_event()
            self.running, self.starts, self.header, self._in_header = True, self.starts + 1, {}, True
            self._add_header_line(text)
            if self.starts == 1:
                self._add_event(time, "started", "the first process of the run")
        elif text.startswith("memory  "):
            self._add_header_line(text)
        elif match := RESUMED.match(text):
            self.lost += max(0, self.step - int(match[1]))
            self.step = int(match[1])
            self._add_event(time, "resumed", text)
        elif match := STOPPED.match(text):
            self.step, self.running = int(match[1] or self.step), False
            self._add_event(time, "stopped", text)
        elif match := ENDS.match(text):
            self.step = int(match[1])
            self._add_event(time, "ended", text)
        elif text.startswith(SUMMARY_LABELS):
            self.running = False
            self._add_event(time, "ended", text)
        elif ": the recipe changed: " in text:
            self._add_event(time, "recipe", text.partition(": ")[2])

    def add_kill_event(self) -> None:
        """Add the newest process's kill, because it did not log its end."""
        self.running = False
        where = f"the last line in the log is of step {self.step}" if self.step else "it was before the first step"
        self._add_event(
            self._alive_at, "killed", f"killed, or failed with an error that only the terminal shows; {where}"
        )

    def add_training_end(self, time: str, step: int) -> None:
        """Add the training's end after this step, because the report is written before the log contains the end."""
        self.running, self.step, self.last = False, step, time
        self._add_event(time, "ended", f"all {step:,} steps are done")

    def _add_header_line(self, line: str) -> None:
        """Add a header line, a label and a text."""
        label, text = line[:LABEL_WIDTH].strip(), line[LABEL_WIDTH:].strip()
        if label and text and len(self.header) < 20:
            self.header[label] = text[:MAX_TEXT_LENGTH]

    def _set_step_and_total(self, match: re.Match[str]) -> None:
        """Set the last step and the run's step count from a matched step line."""
        self.step, self.total = int(match[1]), int(match[2])

    def _add_event(self, time: str, kind: Kind, text: str) -> None:
        """Add an event after the last step; with too many, leave out one in the middle."""
        self.events.append(LogEvent(time, kind, self.step, text[:MAX_TEXT_LENGTH]))
        if len(self.events) > MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
            self.omitted += 1


def read_log(folder: Path) -> RunLog:
    """Read rank 0's log in a run folder. Raises UserError if the file is a link or not a regular file."""
    return parse_log(line.decode("utf-8", "replace").rstrip("\n") for line in read_lines(folder / LOG))


def parse_log(lines: Iterable[str]) -> RunLog:
    """Return the events, header and state from the lines of a log, the oldest first."""
    log = RunLog()
    for line in lines:
        log.update_from_line(line)
    return log
