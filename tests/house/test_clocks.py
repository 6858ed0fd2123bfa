"""The wall clock, which people can set, only informs people."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = ("time.time(", "datetime.now(", "datetime.today(", "st_mtime", "getmtime", "localtime(", "gmtime(")

ALLOWED = {
    "components/checkpoint/mirror.py",  # whether a file has changed since it was uploaded
    "components/distributed/error_file.py",  # torchrun shows people times
    "components/data/sources/files.py",  # whether a file has changed since it was tokenized
    "components/run/locks.py",  # tells a person since when a folder is in use
    "components/storage/durable_files.py",  # whether a file is the one that was checked
    "graph/registry/registry.py",  # whether packages were installed since the search path was read
}


def test_nothing_is_decided_by_a_clock_that_can_jump() -> None:
    """Only the listed files read the wall clock; limits use the monotonic clock, and steps order checkpoints."""
    sources = [path for floor in ("components", "graph", "kernels") for path in (ROOT / floor).rglob("*.py")]
    reading = {str(path.relative_to(ROOT)) for path in sources if any(word in path.read_text("utf-8") for word in WALL)}
    assert reading == ALLOWED
