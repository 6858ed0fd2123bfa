"""
Option `--forks N` of pytest: collect the tests once, and run them in N forked processes, a file at a time.

Processes of pytest-xdist each import torch and all modules of tests, for ten seconds. Ours share the imported modules,
and the fork server of `support.processes`.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

Files = Sequence[Sequence[pytest.Item]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    help = "run the tests in N forked processes, a file at a time"
    parser.addoption("--forks", type=int, default=0, metavar="N", help=help)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forked processes; None, for pytest's own loop, without the option or after failed imports."""
    count: int = session.config.getoption("forks")
    if not count or session.testsfailed or session.config.getoption("collectonly"):
        return None
    files = [[*items] for _, items in groupby(session.items, key=lambda item: item.path)]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all processes
    context, waiting = multiprocessing.get_context("fork"), iter(range(len(files)))
    processes: dict[Connection, ForkProcess] = {}
    tests: dict[Connection, str] = {}  # that the processes run
    try:
        for _ in range(count):
            own, other = context.Pipe()
            arguments = session, files, other, [*processes, own]
            processes[own] = context.Process(target=_run_files, args=arguments)
            processes[own].start()
            other.close()
        while processes:
            for connection in wait([*processes]):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except EOFError:
                    _end(session, processes.pop(connection), tests.get(connection, "no test"))
                    continue
                if message is None:
                    connection.send(next(waiting, None))
                elif isinstance(message, str):
                    tests[connection] = message
                else:
                    _report(session, message)
    finally:
        for process in processes.values():
            process.kill()
    return True


def _end(session: pytest.Session, process: ForkProcess, test: str) -> None:
    """Wait for a process to end, and end the session if it has failed."""
    process.join()
    if process.exitcode:
        session.shouldfail = f"a process of tests ended with code {process.exitcode} in {test}"
        raise session.Failed(session.shouldfail)


def _report(session: pytest.Session, data: dict[str, Any]) -> None:
    """Report a test that a process has run."""
    hook = session.config.hook
    hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=data))
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


class Reporter:
    """Plugin that sends the names and reports of tests to the process of the session."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Send the name of a test before it runs."""
        self._connection.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        self._connection.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _run_files(session: pytest.Session, files: Files, connection: Connection, inherited: Sequence[Connection]) -> None:
    """Run the tests of files until none is left."""
    for other in inherited:
        other.close()
    config = session.config
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # into files that all processes would share
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Reporter(config, connection))
    items = _iterate_items(files, connection)
    item = next(items, None)
    while item is not None:
        following = next(items, None)  # for whose fixtures pytest asks
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


def _iterate_items(files: Files, connection: Connection) -> Iterator[pytest.Item]:
    """Ask for one file after another, and yield its tests."""
    while True:
        connection.send(None)
        if (number := connection.recv()) is None:
            return
        yield from files[number]
