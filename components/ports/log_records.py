"""Marks of log records, by which a listener recognizes the records of other components."""

import logging

PRINTED = "printed"
"""Mark of a record that was already printed on the terminal."""

STEP_LINE = "step_line"
"""Mark of a record with the numbers of a step."""


def is_marked(record: logging.LogRecord, mark: str) -> bool:
    """Return whether a record was logged with `extra={mark: True}`."""
    return bool(vars(record).get(mark))
