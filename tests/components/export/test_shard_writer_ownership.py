"""The ranks that write tensors."""

from typing import Any

import pytest

from drawloom.components.export.shard_writer import choose_owner_by_mapper_group
from drawloom.components.weights.mapper import identity, parallel, stack
from drawloom.graph import UserError


def rank(*stages: str, dtype: str = "torch.float32") -> dict[str, Any]:
    """Return a rank whose stages hold tensors of these letters."""
    return {name: [[2], dtype] for names in stages for name in names}


def test_the_first_rank_that_holds_a_group_owns_it() -> None:
    """A group belongs to the first rank with all its tensors; further copies are not written again."""
    mapper = parallel(stack(["a", "b"], "ab"), identity("c", "d", "e"))
    assert choose_owner_by_mapper_group(mapper, [rank("a", "c"), rank("ab", "c"), rank("bcde")]) == [1, 0, 2, 2]
    assert choose_owner_by_mapper_group(mapper, [rank("abc", "de"), rank("abcde")]) == [0, 0, 0, 0]


def test_missing_and_unexpected_tensors_are_reported() -> None:
    """Missing and unexpected parameters are listed in one message."""
    with pytest.raises(UserError, match=r"no rank has b; export .*\nx have no Hugging Face name"):
        choose_owner_by_mapper_group(identity("a", "b"), [rank("a"), rank("x")])


def test_a_group_on_no_single_rank_is_reported() -> None:
    """Tensors to be joined cannot lie on two ranks."""
    with pytest.raises(UserError, match="a, b become ab together, and no rank holds them all"):
        choose_owner_by_mapper_group(stack(["a", "b"], "ab"), [rank("a"), rank("b")])


def test_ranks_that_hold_different_models_are_reported() -> None:
    """Copies have one shape and one dtype."""
    with pytest.raises(UserError, match=r"a is \[\[2\], 'torch.float32'\] on one rank and .*bfloat16"):
        choose_owner_by_mapper_group(identity("a"), [rank("a"), rank("a", dtype="torch.bfloat16")])
