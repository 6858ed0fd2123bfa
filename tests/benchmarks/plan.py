"""
Plans compared with runs: `make bench NAME=plan`, and on a GPU `make bench NAME=plan ONLY=--gpu`.

13 recipes train for some steps with `planning.check`, which reports planned and measured figures: the median step time
and, on a GPU, torch's peak allocated bytes. The plan uses the built-in device table or, after
`drawloom plan --calibrate`, the machine's measured figures.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 12

CASES: dict[str, tuple[str, ...]] = {
    "dense": (),
    "8 layers": ("model.num_hidden_layers=8",),
    "wide": ("model.hidden_size=384", "model.intermediate_size=1024"),
    "long rows": ("vars.length=1024", "batch.global_size=4", "batch.micro_size=4"),
    "microbatches": ("batch.micro_size=4",),
    "mixed precision": ("precision.compute=bfloat16", "precision.gradient=float32"),
    "bfloat16": ("precision.parameter=bfloat16", "optimizer.use=optim.stochastic_adamw", "optimizer.lr=1e-3"),
    "sgd": ("optimizer.use=optim.sgd", "optimizer.lr=0.1"),
    "selective": ("stages.recompute=selective",),
    "quantized": ("stages.recompute=quantized",),
    "blocks": ("stages.recompute=blocks",),
    "every second block": ("stages.recompute=2",),
    "experts": ("moe",),
}

LARGE = (
    *("model.hidden_size=2048", "model.num_attention_heads=16", "model.num_key_value_heads=8", "model.head_dim=128"),
    *("model.intermediate_size=6144", "model.num_hidden_layers=8", "vars.length=4096", "batch.global_size=8"),
    *("batch.micro_size=2", "precision.compute=bfloat16", "precision.gradient=float32"),
)
"""Sizes that keep a GPU busy. A case's own settings override them."""


def main() -> None:
    """Print a line per case."""
    large = LARGE if "--gpu" in sys.argv else ()
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    for name, words in CASES.items():
        if not wanted or name in wanted:
            print(f"{name:20}{_line(words, large)}", flush=True)


def _line(words: tuple[str, ...], large: tuple[str, ...]) -> str:
    """Run a case, and return its plan report, or the last line of its error."""
    recipe, words = ("moe", words[1:]) if words[:1] == ("moe",) else ("first_run", words)
    if recipe == "moe":
        large = tuple(word for word in large if "intermediate" not in word)
    if any(word.startswith("precision.parameter") for word in words):
        large = tuple(word for word in large if not word.startswith("precision"))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = [f"run.folder={run}", f"trainer.steps={STEPS}", 'listeners.plan={use="planning.check"}']
        command = [sys.executable, "-m", "drawloom", "run", recipe, *large, *words, *settings, "trainer.on_finish=[]"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        plan = run / "plan.txt"
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return plan.read_text().removeprefix("plan").strip() if plan.is_file() else " ".join(last)


if __name__ == "__main__":
    main()
