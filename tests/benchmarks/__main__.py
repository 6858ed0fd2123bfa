"""Run benchmarks by name, or all of them: `make bench`, `make bench ONLY="graph"`."""

import importlib.util
import sys
from pathlib import Path


def run(path: Path) -> None:
    """Run one benchmark's `main`."""
    print(f"\n== {path.stem}", flush=True)
    spec = importlib.util.spec_from_file_location(f"benchmarks.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.main()


for benchmark in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    if len(sys.argv) == 1 or benchmark.stem in sys.argv[1:]:
        run(benchmark)
