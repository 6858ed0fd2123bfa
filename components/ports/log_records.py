"""Marks on log records, by which listeners recognize other components' records."""

import logging

PRINTED = "printed"
"""Mark of a record that was already printed on the terminal."""

STEP_LINE = "step_line"
"""Mark of a record with the numbers of a step."""


def is_marked(record: logging.LogRecord, mark: str) -> bool:
    """Return whether a record was logged with `extra={mark: True}`."""
    return bool(vars(record).get(mark))
