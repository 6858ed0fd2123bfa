"""Batches with any leaves, divided by their specs."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.state.batch import Batch, leaf
from support.clips import Clips, clips


def test_rows_are_taken_of_leaves_that_have_rows() -> None:
    """Leaves of rows and tokens are cut, in trees as well; others stay the same objects."""
    whole = clips()
    part = whole.take_rows(slice(1, 3))
    assert isinstance(part, Clips) and part.row_count == 2
    assert torch.equal(part.frames["right"], whole.frames["right"][1:3]) and part.labels.tolist() == [1, 2]
    assert part.scale is whole.scale and part.mask is None and part.skipped == 4


def test_tokens_are_taken_of_leaves_that_have_tokens() -> None:
    """A context slice has some tokens from every row, and all values of leaves with one value per row."""
    whole = clips()
    part = whole.take_tokens(torch.tensor([0, 5]))
    assert part.frames["left"].tolist() == [[0, 5], [6, 11], [12, 17], [18, 23]]
    assert part.frames["right"].shape == (4, 2, 2) and part.labels is whole.labels and part.length == 2


def test_a_batch_is_pickled_and_evolved_with_all_of_its_leaves() -> None:
    """Processes and steps make batches anew; leaves with unknown names are kept."""
    again = pickle.loads(pickle.dumps(clips().evolve(labels=torch.zeros(4))))
    assert type(again) is Clips and not again.labels.any() and again.skipped == 4
    assert again.without_host_values().skipped == 0
    with pytest.raises(TypeError, match="Clips has no leaf lables"):
        again.evolve(lables=torch.zeros(4))


def test_a_subclass_has_the_leaves_of_its_base() -> None:
    """A subclass with one more leaf splits all leaves."""

    class Rated(Clips):
        rating: Tensor = leaf("rows", kw_only=True)

    base = clips()
    rated = Rated(base.frames, base.labels, base.scale, base.weights, rating=torch.arange(4.0))
    assert rated.take_rows(slice(2, 4)).rating.tolist() == [2.0, 3.0] and len(Rated.specs) == 7


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"labels": torch.ones(3)}, r"Clips.labels has shape \(3,\), which does not begin with \(4,\), as leaf"),
        ({"mask": torch.ones(4, 5)}, r"Clips.mask has shape \(4, 5\), which does not begin with \(4, 6\)"),
        ({"frames": {"left": torch.ones(4)}}, r"Clips.frames has shape \(4,\), which does not begin with"),
        ({"skipped": torch.ones(())}, r'Clips.skipped is a tensor, and declared leaf\("host"\)'),
        ({"weights": torch.ones(4).double()}, r"Clips.weights are torch.float64; write float32"),
    ],
)
def test_leaves_of_wrong_shape_are_named(leaves: dict[str, Any], message: str) -> None:
    """The message has the leaf, its shape, and the shape expected from its spec and the weights."""
    clips().check()
    with pytest.raises(ValueError, match=message):
        clips().evolve(**leaves).check()


def test_a_class_is_refused_where_it_does_not_say_how_leaves_are_divided() -> None:
    """A field without a spec, a class without weights, and a value of the host without a default."""
    with pytest.raises(
        TypeError, match=r"Plain.labels does not declare how it is divided; write one of leaf\(\"rows\"\)"
    ):

        class Plain(Batch):
            labels: Tensor
            weights: Tensor = leaf("rows")

    with pytest.raises(
        TypeError, match=r'Bare does not declare the leaf `weights`; write weights: Tensor = leaf\("rows"\)'
    ):

        class Bare(Batch):
            labels: Tensor = leaf("rows")

    with pytest.raises(TypeError, match=r"Counted.count needs a default"):

        class Counted(Batch):
            count: int = leaf("host")
            weights: Tensor = leaf("rows")


def test_a_plan_of_a_class_without_an_outline_gives_a_remedy() -> None:
    """The error asks for `make_meta_batch`, because only the user's class knows the shapes of its leaves."""
    with pytest.raises(NotImplementedError, match=r"Clips .* define the class method make_meta_batch\(rows, length\)"):
        Clips.make_meta_batch(2, 3)
