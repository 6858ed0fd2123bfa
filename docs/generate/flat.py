"""The page with a run as one file of plain PyTorch."""

from drawloom import Recipe
from drawloom.components.commands.recipes._flat_source import format_flat_source

TEXT = """\
# first_run in one file

`drawloom show first_run --source --to flat.py` writes the file below: the whole run in plain PyTorch, for reading
without indirection. `python flat.py` prints the losses and gradient norms of `drawloom run first_run`, the same to the
bit with the same torch and as many threads.

```python
"""


def flat_source_page() -> str:
    """The file for the first run."""
    return f"{TEXT}{format_flat_source(Recipe.load('first_run'))}```\n"
