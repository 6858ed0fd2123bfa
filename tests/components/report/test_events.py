"""A run's events, from its log; `tests/runs/test_report.py` reads a killed run's log."""

from drawloom.components.report.events import MAX_EVENTS, parse_log


def line(text: str, level: str = "INFO", logger: str = "drawloom.run", second: int = 0) -> str:
    """Return a line of a log."""
    return f"2026-01-01 00:00:{second:02d},000 {level} {logger}: {text}"


BEGIN = [line("run     mine, in runs/mine"), "model   Qwen3, 10 parameters", line("memory  1.0 MB  parameters 0.5 MB")]


def test_a_process_without_an_end_was_killed() -> None:
    """The kill is at the log's last step; a process that ended or failed was not killed."""
    killed = [*BEGIN, line("step 10/40  loss 1.0000", second=7), line("no run line", logger="drawloom.data", second=9)]
    ended = [*BEGIN, line("resuming after step 5"), line("trained steps 6 to 40 in 0:00:01")]
    log = parse_log([*killed, *ended, *BEGIN])
    assert [(event.kind, event.step) for event in log.events] == [
        ("started", 0),
        ("killed", 10),
        ("resumed", 5),
        ("ended", 5),
    ]
    assert log.events[1].time.endswith(":07") and log.starts == 3 and log.running
    assert (log.lost, log.first[-2:], log.last[-2:]) == (5, "00", "00")


def test_stops_and_changes_of_a_run_are_events() -> None:
    """The page has the log's signals, failures, skipped steps, warnings and recipe changes."""
    log = parse_log(
        [
            *BEGIN,
            line("runs/mine: the recipe changed: [batch] micro_size: 4 -> 2 (safe)"),
            line("step 3/40 skipped: the gradients are not finite", "WARNING"),
            line("metrics.jsonl is full", "WARNING", "drawloom.trackers"),
            line("stopped by Ctrl-C after step 4; the same command resumes the run"),
            *BEGIN,
            line("rank 0 failed", "ERROR", "drawloom.distributed"),
            *BEGIN,
        ]
    )
    kinds = [event.kind for event in log.events]
    assert kinds == ["started", "recipe", "skipped", "warning", "stopped", "error"]
    assert log.skipped == 1 and log.events[2].step == 3 and log.total == 40
    assert log.header == {
        "run": "mine, in runs/mine",
        "model": "Qwen3, 10 parameters",
        "memory": "1.0 MB  parameters 0.5 MB",
    }


def test_many_events_are_cut_in_the_middle() -> None:
    """The first and the last events are kept, and all skipped steps are counted."""
    log = parse_log(line(f"step {step}/99999 skipped: NaN", "WARNING") for step in range(1, 5001))
    assert len(log.events) == MAX_EVENTS and log.omitted == 5000 - MAX_EVENTS and log.skipped == 5000
    assert log.events[0].step == 1 and log.events[-1].step == 5000
