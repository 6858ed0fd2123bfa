"""The state of a step, written in one view and read in the other."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from drawloom.components.pipeline.state.handler import MissingStateError, PipelineStateError, PipelineStateHandler
from drawloom.components.ports.pipeline import Replicate, Shard, SpecTree, Stack
from drawloom.components.storage.pytree import leaves

NUMBERS = st.lists(st.integers(-5, 5), min_size=3, max_size=3)


@attrs.frozen
class Case:
    """A whole value, its shards in order, and the sharding spec that relates them (or None)."""

    whole: Any
    shards: list[Any]
    spec: dict[str, SpecTree] = attrs.field(factory=dict)


def _row(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


BOTH_WAYS = {
    "losses": Case(_row(0.5, 1.5), [_row(0.5), _row(1.5)], {"x": Shard()}),
    "losses, inferred": Case(_row(0.5, 1.5), [_row(0.5), _row(1.5)]),
    "rows": Case(_row(0, 1, 2, 3), [_row(0, 1), _row(2, 3)], {"x": Shard()}),
    "rows, inferred": Case(_row(0, 1, 2, 3), [_row(0, 1), _row(2, 3)]),
    "matrix, inferred": Case(torch.eye(2), [torch.eye(2)[:1], torch.eye(2)[1:]]),
    "columns": Case(torch.eye(2), [torch.eye(2)[:, :1], torch.eye(2)[:, 1:]], {"x": Shard(1)}),
    "list": Case([1, 2, 3, 4], [[1, 2], [3, 4]], {"x": Shard()}),
    "list, inferred": Case([1, 2, 3, 4], [[1, 2], [3, 4]]),
    "stacked numbers": Case(_row(10, 20), [torch.tensor(10.0), torch.tensor(20.0)], {"x": Stack()}),
    "stacked rows": Case(torch.eye(2), [_row(1, 0), _row(0, 1)], {"x": Stack()}),
    "items": Case([15, 12], [15, 12], {"x": Stack()}),
    "replica": Case("text", ["text", "text"], {"x": Replicate()}),
    "tree": Case(
        {"a": _row(1, 2), "b": 3},
        [{"a": _row(1), "b": 3}, {"a": _row(2), "b": 3}],
        {"x": {"a": Shard(), "b": Replicate()}},
    ),
    "one part": Case(_row(1, 2), [_row(1, 2)]),
}
TO_THE_WHOLE = BOTH_WAYS | {
    "numbers, inferred": Case(_row(0.5, 1), [torch.tensor(0.5), torch.tensor(1.0)]),
    "items, inferred": Case([15, 12], [15, 12]),
    "tree, inferred": Case(
        {"l": _row(1, 2), "n": ["a", "b"]}, [{"l": torch.tensor(1.0), "n": "a"}, {"l": torch.tensor(2.0), "n": "b"}]
    ),
    "unequal rows": Case(_row(1, 2, 3), [_row(1, 2), _row(3)]),
}
TO_PARTS = BOTH_WAYS | {
    "rows of one": Case(_row(0.5, 1), [_row(0.5), _row(1)]),
    "lists of one": Case([15, 12], [[15], [12]]),
    "number": Case(torch.tensor(3.0), [torch.tensor(3.0)] * 2),
    "tree, inferred": Case({"rows": _row(1, 2), "n": "a"}, [{"rows": _row(1), "n": "a"}, {"rows": _row(2), "n": "a"}]),
}


def equal(one: Any, other: Any) -> bool:
    """Whether values are the same, tensors by shape, dtype and number."""
    mine, theirs = leaves(one), leaves(other)
    return (
        type(one) is type(other)
        and len(mine) == len(theirs)
        and all(
            torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(mine, theirs, strict=True)
        )
    )


def handler_of(case: Case) -> PipelineStateHandler:
    return PipelineStateHandler(case.spec, len(case.shards))


def write_parts(handler: PipelineStateHandler, case: Case, order: list[int]) -> None:
    for shard in order:
        handler.sharded_state(shard)["x"] = case.shards[shard]


@pytest.mark.parametrize("name", TO_THE_WHOLE)
def test_shards_are_read_as_a_whole(name: str) -> None:
    """Shards written in any order are read as the whole, and each is still read as it was written."""
    case = TO_THE_WHOLE[name]
    for order in (list(range(len(case.shards))), list(reversed(range(len(case.shards))))):
        handler = handler_of(case)
        write_parts(handler, case, order)
        assert equal(handler.global_state()["x"], case.whole)
        assert equal([handler.sharded_state(shard)["x"] for shard in range(len(case.shards))], case.shards)


@pytest.mark.parametrize("name", TO_PARTS)
def test_a_whole_is_read_in_shards(name: str) -> None:
    """A value written as a whole is read by each microbatch, and is still read as a whole."""
    case = TO_PARTS[name]
    handler = handler_of(case)
    handler.global_state()["x"] = case.whole
    assert equal([handler.sharded_state(shard)["x"] for shard in range(len(case.shards))], case.shards)
    assert equal(handler.global_state()["x"], case.whole)


class Views(RuleBasedStateMachine):
    """Writes and reads in any order, against a list of rows as the model of what must be read."""

    def __init__(self) -> None:
        super().__init__()
        self.handler = PipelineStateHandler({}, 3)
        self.rows: list[int | None] = [None] * 3

    @rule(numbers=NUMBERS)
    def write_whole(self, numbers: list[int]) -> None:
        self.handler.global_state()["x"] = torch.tensor(numbers)
        self.rows = list(numbers)

    @rule(shard=st.integers(0, 2), number=st.integers(-5, 5))
    def write_part(self, shard: int, number: int) -> None:
        self.handler.sharded_state(shard)["x"] = torch.tensor([number])
        self.rows[shard] = number

    @rule()
    def reset(self) -> None:
        self.handler.reset()
        self.rows = [None] * 3

    @rule(shard=st.integers(0, 2))
    def read_part(self, shard: int) -> None:
        view = self.handler.sharded_state(shard)
        assert ("x" in view) == (self.rows[shard] is not None)
        if "x" in view:
            assert view["x"].tolist() == [self.rows[shard]]
        else:
            with pytest.raises(MissingStateError):
                view["x"]

    @rule()
    def read_whole(self) -> None:
        view = self.handler.global_state()
        assert ("x" in view) == (None not in self.rows)
        if "x" in view:
            assert view["x"].tolist() == self.rows
        else:
            with pytest.raises(MissingStateError):
                view["x"]

    @invariant()
    def what_is_present_can_be_read(self) -> None:
        assert self.handler.shards_present("x") == [place for place, row in enumerate(self.rows) if row is not None]


TestViews = Views.TestCase


def test_missing_values_are_named() -> None:
    """The error names the view, the name and the shards of a missing value."""
    handler = PipelineStateHandler({}, 4)
    handler.sharded_state(0)["loss"] = torch.ones(())
    handler.sharded_state(2)["loss"] = torch.ones(())
    sentences = {
        "global_state()['loss'] is missing: of 4 shards, shards 1, 3 were not written": handler.global_state(),
        "sharded_state(3)['loss'] is missing: of 4 shards, shard 3 was not written": handler.sharded_state(3),
    }
    for sentence, view in sentences.items():
        with pytest.raises(KeyError) as caught:
            view["loss"]
        assert str(caught.value) == sentence
    with pytest.raises(PipelineStateError, match=r"sharded_state\(1\)\['other'\] is missing: it has not been written"):
        handler.sharded_state(1)["other"]


def test_sharding_errors_name_view_and_value() -> None:
    """Errors of sharding and joining name the view and the value, when reading and when writing."""
    handler = PipelineStateHandler({"fixed": Shard()}, 2)
    handler.global_state()["fixed"] = torch.ones(3)
    with pytest.raises(PipelineStateError, match=r"^sharded_state\(1\)\['fixed'\]: a tensor of shape \(3,\) can't be"):
        handler.sharded_state(1)["fixed"]
    with pytest.raises(PipelineStateError, match=r"^sharded_state\(0\)\['fixed'\]: a tensor of shape \(3,\) can't be"):
        handler.sharded_state(0)["fixed"] = torch.ones(1)
    handler.sharded_state(0)["loss"] = torch.ones(())
    handler.sharded_state(1)["loss"] = torch.ones(1)
    with pytest.raises(PipelineStateError, match=r"^global_state\(\)\['loss'\]: the parts can't be joined by Stack"):
        handler.global_state()["loss"]
    with pytest.raises(PipelineStateError, match=r"^the specification of 'x': at \['a'\]: 3 is not a sharding spec"):
        PipelineStateHandler({"x": {"a": 3}}, 2)


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_id_out_of_range_is_refused(shard: int) -> None:
    """A view of a microbatch that the step does not have is refused at once."""
    with pytest.raises(PipelineStateError, match="shards are 0 to 1"):
        PipelineStateHandler({}, 2).sharded_state(shard)
    with pytest.raises(PipelineStateError, match="at least one"):
        PipelineStateHandler({}, 0)


def test_a_reset_forgets_what_was_inferred() -> None:
    """A name that held numbers in one step can hold rows in the next; a given spec stays."""
    handler = PipelineStateHandler({"given": Shard(1)}, 2)
    for step in (torch.ones(()), torch.ones(1)):
        for shard in range(2):
            handler.sharded_state(shard)["x"] = step
            handler.sharded_state(shard)["given"] = torch.ones(1, 1)
        assert handler.global_state()["x"].tolist() == [1, 1]
        assert handler.global_state()["given"].tolist() == [[1, 1]]
        handler.reset()
        assert "x" not in handler.global_state()
        assert "x" not in handler.sharded_state(0)


def test_written_tensors_are_detached() -> None:
    """No view holds the autograd graph of a value, at any depth, and the tensor that was written keeps its graph."""
    handler = PipelineStateHandler({}, 2)
    written = torch.ones(2, requires_grad=True) * 2
    handler.global_state()["x"] = {"deep": [written]}
    handler.sharded_state(0)["y"] = (written, 1)
    assert handler.global_state()["x"]["deep"][0].grad_fn is None
    assert not handler.sharded_state(0)["y"][0].requires_grad
    assert written.grad_fn is not None


def test_containers_are_not_shared() -> None:
    """Appending to a list that was written or read does not change the stored value."""
    handler = PipelineStateHandler({}, 2)
    mine = {"a": [1, 2]}
    handler.global_state()["x"] = mine
    mine["a"].append(3)
    handler.global_state()["x"]["a"].append(4)
    handler.sharded_state(0)["x"]["a"].append(5)
    assert handler.global_state()["x"] == {"a": [1, 2]}
    assert handler.sharded_state(0)["x"] == {"a": [1]}


@given(copy=st.booleans(), from_parts=st.booleans())
def test_tensors_are_shared_unless_copies_are_asked_for(copy: bool, from_parts: bool) -> None:
    """With `copy`, a change in place does not reach the stored value; without, nothing is copied."""
    handler = PipelineStateHandler({}, 2, copy=copy)
    written = torch.zeros(1)
    view = handler.sharded_state(0) if from_parts else handler.global_state()
    view["x"] = written
    read = view["x"]
    assert (read.data_ptr() == written.data_ptr()) == (not copy)
    written.fill_(1)
    read.fill_(2)
    assert float(view["x"]) == (0 if copy else 2)
