"""The state of a step, written in one view and read in the other."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from drawloom.components.state.step_state import MissingStateError, PipelineStateError, StepState
from drawloom.components.state.trees import Spec, list_leaves
from support.steps import LateState

NUMBERS = st.lists(st.integers(-5, 5), min_size=3, max_size=3)


@attrs.frozen
class Case:
    """A whole value, its shards in order, and the sharding spec that relates them (or None)."""

    whole: Any
    shards: list[Any]
    spec: dict[str, Spec] = attrs.field(factory=dict)


def _row(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


BOTH_WAYS = {
    "losses": Case(_row(0.5, 1.5), [_row(0.5), _row(1.5)], {"x": "shard"}),
    "losses, inferred": Case(_row(0.5, 1.5), [_row(0.5), _row(1.5)]),
    "rows": Case(_row(0, 1, 2, 3), [_row(0, 1), _row(2, 3)], {"x": "shard"}),
    "rows, inferred": Case(_row(0, 1, 2, 3), [_row(0, 1), _row(2, 3)]),
    "matrix, inferred": Case(torch.eye(2), [torch.eye(2)[:1], torch.eye(2)[1:]]),
    "list": Case([1, 2, 3, 4], [[1, 2], [3, 4]], {"x": "shard"}),
    "list, inferred": Case([1, 2, 3, 4], [[1, 2], [3, 4]]),
    "stacked numbers": Case(_row(10, 20), [torch.tensor(10.0), torch.tensor(20.0)], {"x": "stack"}),
    "stacked rows": Case(torch.eye(2), [_row(1, 0), _row(0, 1)], {"x": "stack"}),
    "items": Case([15, 12], [15, 12], {"x": "stack"}),
    "replica": Case("text", ["text", "text"], {"x": "replicate"}),
    "tree": Case({"a": _row(1, 2), "b": [3, 4]}, [{"a": _row(1), "b": [3]}, {"a": _row(2), "b": [4]}], {"x": "shard"}),
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
    mine, theirs = list_leaves(one), list_leaves(other)
    return (
        type(one) is type(other)
        and len(mine) == len(theirs)
        and all(
            torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(mine, theirs, strict=True)
        )
    )


def state_of(case: Case) -> StepState:
    return StepState(microbatches=len(case.shards), specs=case.spec)


def write_parts(state: StepState, case: Case, order: list[int]) -> None:
    for shard in order:
        state.microbatch(shard)["x"] = case.shards[shard]


@pytest.mark.parametrize("name", TO_THE_WHOLE)
def test_shards_are_read_as_a_whole(name: str) -> None:
    """Shards written in any order are read as the whole, and each is still read as it was written."""
    case = TO_THE_WHOLE[name]
    for order in (list(range(len(case.shards))), list(reversed(range(len(case.shards))))):
        state = state_of(case)
        write_parts(state, case, order)
        assert equal(state["x"], case.whole)
        assert equal([state.microbatch(shard)["x"] for shard in range(len(case.shards))], case.shards)


@pytest.mark.parametrize("name", TO_PARTS)
def test_a_whole_is_read_in_shards(name: str) -> None:
    """A value written as a whole is read by each microbatch, and is still read as a whole."""
    case = TO_PARTS[name]
    state = state_of(case)
    state["x"] = case.whole
    assert equal([state.microbatch(shard)["x"] for shard in range(len(case.shards))], case.shards)
    assert equal(state["x"], case.whole)


class Views(RuleBasedStateMachine):
    """Writes and reads in any order, against a list of rows as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.state = StepState(microbatches=3)
        self.rows: list[int | None] = [None] * 3

    @rule(numbers=NUMBERS)
    def write_whole(self, numbers: list[int]) -> None:
        self.state["x"] = torch.tensor(numbers)
        self.rows = list(numbers)

    @rule(shard=st.integers(0, 2), number=st.integers(-5, 5))
    def write_part(self, shard: int, number: int) -> None:
        self.state.microbatch(shard)["x"] = torch.tensor([number])
        self.rows[shard] = number

    @rule()
    def reset(self) -> None:
        self.state.clear_for_new_step(3, {})
        self.rows = [None] * 3

    @rule(shard=st.integers(0, 2))
    def read_part(self, shard: int) -> None:
        view = self.state.microbatch(shard)
        assert ("x" in view) == (self.rows[shard] is not None)
        if "x" in view:
            assert view["x"].tolist() == [self.rows[shard]]
        else:
            with pytest.raises(MissingStateError):
                view["x"]

    @rule()
    def read_whole(self) -> None:
        view = self.state
        assert ("x" in view) == (None not in self.rows)
        if "x" in view:
            assert view["x"].tolist() == self.rows
        else:
            with pytest.raises(MissingStateError):
                view["x"]

    @invariant()
    def what_is_present_can_be_read(self) -> None:
        assert self.state.microbatches_present("x") == [index for index, row in enumerate(self.rows) if row is not None]


TestViews = Views.TestCase


def test_missing_values_are_named() -> None:
    """The error names the view, the name and the shards of a missing value."""
    state = StepState(microbatches=4)
    state.microbatch(0)["loss"] = torch.ones(())
    state.microbatch(2)["loss"] = torch.ones(())
    sentences: dict[str, Any] = {
        "['loss'] is missing: of 4 microbatches, microbatches 1, 3 were not written": state,
        "microbatch(3)['loss'] is missing: of 4 microbatches, microbatch 3 was not written": state.microbatch(3),
    }
    for sentence, view in sentences.items():
        with pytest.raises(KeyError) as caught:
            view["loss"]
        assert str(caught.value) == sentence
    with pytest.raises(PipelineStateError, match=r"microbatch\(1\)\['other'\] is missing: it has not been written"):
        state.microbatch(1)["other"]


def test_sharding_errors_name_view_and_value() -> None:
    """Errors of sharding and joining name the view and the value, when reading and when writing."""
    state = StepState(microbatches=2, specs={"fixed": "shard"})
    state["fixed"] = torch.ones(3)
    with pytest.raises(PipelineStateError, match=r"^microbatch\(1\)\['fixed'\]: a tensor of shape \(3,\) can't be"):
        state.microbatch(1)["fixed"]
    with pytest.raises(PipelineStateError, match=r"^microbatch\(0\)\['fixed'\]: a tensor of shape \(3,\) can't be"):
        state.microbatch(0)["fixed"] = torch.ones(1)
    state.microbatch(0)["loss"] = torch.ones(())
    state.microbatch(1)["loss"] = torch.ones(1)
    with pytest.raises(PipelineStateError, match=r"^\['loss'\]: \"stack\" can't join the microbatches' tensors"):
        state["loss"]
    with pytest.raises(PipelineStateError, match=r"^the specification of 'x' is 3; write one of \('shard', "):
        unknown: Any = 3
        StepState(microbatches=2, specs={"x": unknown})


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_id_out_of_range_is_refused(shard: int) -> None:
    """A view for a microbatch outside the step is refused at once."""
    with pytest.raises(PipelineStateError, match="microbatches are 0 to 1"):
        StepState(microbatches=2).microbatch(shard)
    with pytest.raises(PipelineStateError, match="at least 0"):
        StepState(microbatches=-1)


def _state_of_shards(*shards: torch.Tensor) -> StepState:
    state = StepState(microbatches=len(shards))
    for index, shard in enumerate(shards):
        state.microbatch(index)["x"] = shard
    return state


def test_a_value_is_joined_once_after_each_write() -> None:
    """Reading again gives the same object, until a microbatch writes."""
    state = _state_of_shards(torch.ones(1), torch.ones(1))
    whole = state["x"]
    assert state["x"] is whole
    state.microbatch(1)["x"] = torch.zeros(1)
    assert state["x"].tolist() == [1, 0]


def test_a_read_keeps_the_shards() -> None:
    """Shards of unequal sizes stay as they were after the whole is read."""
    parts = [torch.arange(3), torch.arange(2)]
    state = _state_of_shards(*parts)
    assert state["x"].tolist() == [0, 1, 2, 0, 1]
    assert [state.microbatch(index)["x"] for index in range(2)] == parts


def test_a_failed_write_of_a_shard_changes_nothing() -> None:
    """A shard for an indivisible whole is refused, and the whole stays."""
    state = StepState({"x": torch.arange(3)}, microbatches=2)
    with pytest.raises(PipelineStateError, match="evenly"):
        state.microbatch(0)["x"] = torch.ones(1)
    assert state["x"].tolist() == [0, 1, 2]


def test_the_inferred_spec_follows_the_last_write() -> None:
    """A number written as a whole is replicated, rows are sharded; a given spec stays."""
    state = StepState({"x": torch.tensor(5.0)}, microbatches=2, specs={"given": "stack"})
    assert [float(state.microbatch(index)["x"]) for index in range(2)] == [5, 5]
    for name, shards in (("x", [[5], [6]]), ("given", [5, 6])):
        state[name] = torch.tensor([5.0, 6.0])
        assert [state.microbatch(index)[name].tolist() for index in range(2)] == shards


def test_split_drops_values_and_inferred_specs() -> None:
    """A name with numbers can have rows after a split; specs are the split's."""
    state = StepState()
    for written in (torch.ones(()), torch.ones(1)):
        state.clear_for_new_step(2, {"given": "stack"})
        assert "x" not in state and "x" not in state.microbatch(0)
        for index in range(2):
            state.microbatch(index)["x"] = written
            state.microbatch(index)["given"] = torch.ones(1)
        assert state["x"].tolist() == [1, 1]
        assert state["given"].tolist() == [[1], [1]]


def test_written_tensors_are_detached() -> None:
    """No view holds a value's autograd graph, at any depth, and the written tensor keeps its graph."""
    state = StepState(microbatches=2)
    written = torch.ones(2, requires_grad=True) * 2
    state["x"] = {"deep": [written]}
    state.microbatch(0)["y"] = (written, 1)
    assert state["x"]["deep"][0].grad_fn is None
    assert not state.microbatch(0)["y"][0].requires_grad
    assert written.grad_fn is not None


def test_values_without_a_graph_are_the_written_objects() -> None:
    """Nothing is copied: a value is read as the written object, in both views."""
    state = StepState(microbatches=2, specs={"batches": "stack"})
    first, second = {"tokens": torch.zeros(2)}, {"tokens": torch.ones(2)}
    state["batches"] = written = [first, second]
    assert state["batches"] is written and state.microbatch(1)["batches"] is second


def test_a_pass_without_microbatches_has_whole_values_alone() -> None:
    """A state with 0 microbatches reads values from the global view, and has no other view."""
    state = StepState({"batches": []}, microbatches=0, specs={"batches": "stack"})
    assert state["batches"] == [] and "losses" not in state
    with pytest.raises(PipelineStateError):
        state.microbatch(0)


def test_numbers_are_floats_and_tensors_without_dimensions() -> None:
    """Counts, rows and values of microbatches are not numbers; a missing number is named."""
    values = {"lr": 0.5, "loss": torch.tensor(2.0), "rows": torch.ones(2), "count": 3, "name": "a"}
    state = StepState(values, microbatches=2)
    state.microbatch(0)["x"] = state.microbatch(1)["x"] = torch.ones(())
    assert state.numbers() == {"lr": 0.5, "loss": 2.0} and state.number("loss") == 2.0
    with pytest.raises(MissingStateError, match=r"\['norm'\] is missing"):
        state.number("norm")


def test_a_device_is_waited_for_once_and_only_when_a_number_is_read() -> None:
    """One copy has all numbers of the global view, whatever their dtype; numbers written later need a second one."""
    state = LateState({"loss": torch.tensor(2.0, dtype=torch.float64), "skip": torch.tensor(1.0), "lr": 0.5})
    state["totals"] = {"sum": torch.arange(3.0, dtype=torch.float64)}
    state.microbatch(0)["own"] = torch.tensor(7.0)
    state.start_copying_to_host()
    state.start_copying_to_host()
    assert [arrival.waits for arrival in state.arrivals] == [0] and not state.is_on_host
    assert state.number("lr") == 0.5 and not state.is_on_host
    assert state.number("loss") == 2.0 and state.is_on_host
    assert state.number("skip") == 1.0 and state.read_on_host("totals")["sum"].tolist() == [0.0, 1.0, 2.0]
    state["loss"] = torch.tensor(3.0, dtype=torch.float64)
    assert not state.is_on_host and len(state.arrivals) == 1
    assert state.number("loss") == 3.0 and len(state.arrivals) == 2 and state.is_on_host
