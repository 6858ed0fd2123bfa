"""A replay's rank: `python -m torch.distributed.run -m drawloom.components.commands._replay_process`."""

import sys
from pathlib import Path

from drawloom.components.commands._replay import ERROR, train_until_step
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.project import Recipe


def main(path: str, last_step: str, *imports: str) -> int:
    """Replay the recipe in a file to a step, with imported packages, folders or files; return the exit code."""
    try:
        train_until_step(Recipe.load(Path(path), imports=imports), int(last_step))
    except Exception as error:  # the parent process reports it
        print_escaped_text(f"{ERROR}{type(error).__name__}: {' '.join(str(error).split())}", "stderr")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
