"""A pytest plugin that prints a failure at once, for runs that may be stopped before their end."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the end of a failed test's traceback."""
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
