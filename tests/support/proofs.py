"""Proofs of shipped components, and their table for docs/proving.md."""

import re
import sys

from drawloom.components.proving.prover import Prover
from drawloom.components.proving.run import Subject
from drawloom.graph.project import Project

SHIPPED = [
    *(name for name in Project.from_package("drawloom").registry.names() if re.match(r"model\.(?!parametriz)", name)),
    *("rewards.exact_match", "rewards.length", "rewards.math_equal", "rewards.regex"),
    *("loss.next_token", "loss.dft", "optim.adam", "optim.adamw", "optim.muon", "adapters.lora"),
    *("adapters.full_tuning", "gradients.clip_group_norm", "gradients.clip_value", "phases.ema"),
    *("metrics.layer_norms", "metrics.perplexity", "metrics.bits_per_byte", "experts.symmetric"),
    "kernels.batch_invariant",
]


def main(names: list[str]) -> None:
    """Print the table, with all cases, for these components or all."""
    print("| component | like one process | not permitted |\n|---|---|---|")
    with Prover() as prover:
        for name in names or SHIPPED:
            result = prover.prove(Subject(name))
            assert not result.exit_code, result.render("text")
            print(f"| `{name}` | {len(result.equal)} | {len(result.refused)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
