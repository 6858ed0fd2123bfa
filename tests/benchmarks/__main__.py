"""Run one benchmark, `make bench NAME=titan ONLY="its own words"`, or all that need no GPU, `make bench`."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run(path: Path, words: list[str]) -> None:
    """Run one benchmark's `main` with command-line words."""
    print(f"\n== {path.stem}", flush=True)
    sys.argv = [str(path), *words]
    importlib.import_module(".".join(("benchmarks", *path.relative_to(FOLDER).with_suffix("").parts))).main()


def main() -> None:
    """Run the benchmark named by the first word, or all in this folder."""
    paths = {path.stem: path for path in sorted(FOLDER.rglob("[a-z]*.py")) if "\ndef main(" in path.read_text("utf-8")}
    name, *words = sys.argv[1:] or [""]
    if name and name not in paths:
        sys.exit(f"there is no benchmark {name!r}; there are {', '.join(paths)}")
    for path in [paths[name]] if name else [path for path in paths.values() if path.parent == FOLDER]:
        run(path, words)


if __name__ == "__main__":
    main()
