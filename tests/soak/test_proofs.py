"""Proofs: seeded faults, shipped components, and the documents' examples."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawloom.components.proving.prover import Prover
from drawloom.components.proving.subject import Subject
from drawloom.graph.project import Project
from support.blocks import ROOT, read_files
from support.mesh_faults import FAULTS, SeededFault, prove_with

pytestmark = pytest.mark.soak

EXAMPLES = ("focal", "soft_clip", "inverse_sqrt", "lion", "repeats", "counted", "clip_embedding", "parallel_lm")
SHIPPED = [
    *(name for name in Project.from_package("drawloom").registry.names() if re.match(r"model\.(?!parametriz)", name)),
    *("rewards.exact_match", "rewards.length", "rewards.math_equal", "rewards.regex"),
    *("loss.dft", "optim.adam", "optim.adamw", "optim.muon", "adapters.lora", "adapters.full_tuning"),
    *("gradients.clip_group_norm", "gradients.clip_value", "phases.ema", "metrics.layer_norms"),
    *(
        "metrics.perplexity",
        "metrics.bits_per_byte",
        "experts.symmetric",
        "kernels.batch_invariant",
    ),
]
BUDGET = 30.0


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    """Return a prover, whose processes all tests share."""
    with Prover() as prover:
        yield prover


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_with_its_axis(fault: SeededFault, prover: Prover) -> None:
    """A fault reported for a training framework makes a difference, on a mesh with its axis."""
    result = prove_with(fault, prover)
    assert result.difference is not None, result.render("text")
    assert any(axis in result.failed for axis in fault.axes), result.render("text")


@pytest.mark.parametrize("use", SHIPPED)
def test_a_shipped_component_is_like_one_process(use: str, prover: Prover) -> None:
    """There is no alarm for a shipped component, on as many meshes as half a minute allows."""
    result = prover.prove(Subject(use), BUDGET)
    assert result.exit_code == 0 and len(result.equal) > 1, result.render("text")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_the_documents_is_like_one_process(
    name: str, prover: Prover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The components for readers to copy are right on every mesh."""
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").touch()
    for page in ("components.md", "proving.md"):
        for file, text in read_files(ROOT / "docs" / page).items():
            if file.startswith("my_lab/") and file.endswith(".py"):
                (tmp_path / file).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = ["model.width=16", "model.heads=2"] if name == "parallel_lm" else []
    result = prover.prove(Subject(f"my_lab.{name}", sizes, imports=["my_lab"]), BUDGET)
    assert result.exit_code == 0 and len(result.equal) > 1, result.render("text")
