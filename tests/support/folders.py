"""Run folders for tests."""

from pathlib import Path

import attrs


@attrs.frozen
class Folder:
    """A run folder implementing the port."""

    folder: Path
