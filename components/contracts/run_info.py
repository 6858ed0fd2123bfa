"""What every job is."""

from pathlib import Path

from drawloom.components.ports.run import RunInfo
from drawloom.graph.testing import expect


def it_is_known(job: RunInfo) -> None:
    """It has a name, a seed and a folder, and they do not change."""
    expect(isinstance(job.name, str) and job.name, "it has no name")
    expect(isinstance(job.seed, int) and isinstance(job.path, Path), "it has no seed, or no folder")
    expect((job.name, job.seed, job.path) == (job.name, job.seed, job.path), "it changes")
