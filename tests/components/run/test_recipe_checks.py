"""Batch leaves read by components, compared with the leaves written by data."""

import pytest

from drawloom.graph.project import Recipe

CLIPS = ("packing.use=support.clips", "trainer.on_finish=[]")


def problems(*words: str) -> list[str]:
    """Return the problems of the first recipe with clips in place of its data."""
    recipe = Recipe.load("first_run", *CLIPS, *words, imports="support.clips")
    return [f"{problem.node}: {problem.text}; {problem.hint}" for problem in recipe.graph.errors]


def test_a_loss_is_refused_if_the_data_lack_its_leaves() -> None:
    """The problem names the loss, the missing leaves, the data and its leaves."""
    [problem] = problems()
    assert problem == (
        "loss: [loss] reads the leaves tokens, targets, positions, document_ids of batches, and [packing] makes Clips, "
        "which has frames, labels, scale, weights, mask, skipped; use another component in [loss] or in [packing]"
    )


def test_a_metric_is_refused_like_a_loss() -> None:
    """Every reader of leaves is compared, anywhere in the recipe."""
    [loss, metric] = sorted(problems("metrics.bits.use=metrics.bits_per_byte"))
    assert loss.startswith("loss: ") and "[metrics.bits] reads the leaf targets of batches" in metric


def test_the_batches_of_collated_rows_are_the_collators() -> None:
    """A data set whose rows a collator makes declares no class of its own."""
    words = ("packing.use=data.collated", "packing.max_length=8", "examples.use=data.json_examples")
    more = ("examples.paths=['x']", "collator.use=data.pad_collator")
    assert not Recipe.load("first_run", *words, *more).graph.errors


@pytest.mark.parametrize(
    ("word", "node", "text"),
    [
        ("mesh.context=3", "", ""),
        (
            "data.lengths=[{length=4, until_step=2}]",
            "data",
            "lengths only applies to batches of tokens, and [packing] makes Clips",
        ),
    ],
)
def test_leaves_of_tokens_are_divided_along_context(word: str, node: str, text: str) -> None:
    """Rows of frames are partitioned over ranks; a length curriculum needs documents."""
    others = [problem for problem in problems(word) if not problem.startswith("loss: ")]
    assert [problem.partition(": ")[0] for problem in others] == [node] * bool(node)
    assert all(text in problem for problem in others)


def test_a_metric_needs_its_phase() -> None:
    """A metric that measures in a phase reports zeros or nothing without it, so `check` refuses the recipe."""
    words = ["metrics.norms.use=metrics.layer_norms"]
    [problem] = Recipe.load("first_run", *words).graph.errors
    assert problem.node == "metrics.norms" and 'before."@optimizer" = "@metrics.norms"' in problem.hint
    phase = """edit.trainer.phases.before={'@optimizer'="@metrics.norms"}"""
    assert not Recipe.load("first_run", *words, phase).graph.errors
