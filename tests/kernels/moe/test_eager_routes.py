"""Routing tables against a sort in plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.moe.eager import moe_routes_eager


def by_hand(expert_indices: list[list[int]], experts: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Return rows by choice, choices by row, and ends of experts, in plain Python."""
    choices = [choice for token in expert_indices for choice in token]
    order = [index for expert in range(experts) for index, chosen in enumerate(choices) if chosen == expert]
    width = len(expert_indices[0]) if expert_indices else 0
    rows = [
        [order.index(t * width + c) if chosen >= 0 else -1 for c, chosen in enumerate(token)]
        for t, token in enumerate(expert_indices)
    ]
    ends = [sum(0 <= choice <= expert for choice in choices) for expert in range(experts)]
    return rows, order + [-1] * (len(choices) - len(order)), ends


chosen = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda sizes: st.lists(
        st.lists(st.integers(-1, sizes[1] - 1), min_size=sizes[0], max_size=sizes[0]), min_size=1, max_size=9
    ).map(lambda rows: (rows, sizes[1]))
)


@given(chosen, st.sampled_from([torch.int32, torch.int64]))
def test_rows_are_sorted_by_expert_then_by_token(case: tuple[list[list[int]], int], dtype: torch.dtype) -> None:
    """Rows follow a stable sort by expert; some experts have no rows, and dropped choices have none."""
    expert_indices, experts = case
    routes = moe_routes_eager(torch.tensor(expert_indices, dtype=dtype), experts)
    assert tuple(table.tolist() for table in routes) == by_hand(expert_indices, experts)
    assert {table.dtype for table in routes} == {torch.int32}


def test_no_tokens_give_empty_tables() -> None:
    """Without tokens every expert ends at 0."""
    routes = moe_routes_eager(torch.empty(0, 4, dtype=torch.int64), 3)
    assert routes.offsets.tolist() == [0, 0, 0]
    assert routes.dest_row.shape == (0, 4)
    assert routes.source_choice.shape == (0,)
