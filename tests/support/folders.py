"""Run folders of tests."""

from pathlib import Path

import attrs


@attrs.frozen
class Folder:
    """A run folder, as the port has it."""

    folder: Path
