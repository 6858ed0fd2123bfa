"""Exchanges between ranks' memory, in Triton, against plain torch."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.moe.eager import (
    PeerTensors,
    moe_peers_eager,
    moe_permute_eager,
    moe_routes_eager,
    moe_unpermute_eager,
)
from drawloom.kernels.moe.triton import moe_peers_triton
from drawloom.kernels.results import Routes
from support.kernels import DEVICE, assert_close, dtypes, few
from support.seeding import seeds

cases = (st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))


def peers(whole: Tensor, ranks: int) -> PeerTensors:
    """Split a tensor into parts, as if each part were in the memory of another rank."""
    parts = whole.chunk(ranks)
    return parts, torch.tensor([part.data_ptr() for part in parts], device=whole.device)


def chosen_by(tokens: int, top_k: int, experts: int) -> Tensor:
    """Return random expert choices, some dropped."""
    return torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32, device=DEVICE)


@few
@given(seeds, *cases, dtypes)
def test_rows_and_sums_equal_plain_torch(
    _seed: object, ranks: int, slots: int, top_k: int, local_experts: int, width: int, dtype: torch.dtype
) -> None:
    """
    Choices, rows, their scalars and staged sums equal plain torch on the same memory; rows and sums also equal one
    rank's with all tokens.
    """
    tokens, first = ranks * slots, local_experts * (ranks - 1)
    chosen = chosen_by(tokens, top_k, local_experts * ranks)
    hidden = torch.randn(tokens, width, device=DEVICE).to(dtype)
    scalars = torch.rand(tokens, top_k, device=DEVICE)
    local = moe_peers_eager.localize_choices(peers(chosen, ranks), first, local_experts)
    assert torch.equal(moe_peers_triton.localize_choices(peers(chosen, ranks), first, local_experts), local)
    routes = moe_routes_eager(local, local_experts)
    routes = routes._replace(source_choice=routes.source_choice[: int(routes.offsets[-1])])
    rows, row_scalars = moe_peers_eager.read_rows_and_scalars(peers(hidden, ranks), peers(scalars, ranks), routes)
    expected: Any = moe_permute_eager(hidden, scalars, routes)
    for actual in (
        (rows, row_scalars),
        moe_peers_triton.read_rows_and_scalars(peers(hidden, ranks), peers(scalars, ranks), routes),
    ):
        assert all(torch.equal(result, reference) for result, reference in zip(actual, expected, strict=True))  # type: ignore[arg-type]
    bare, nothing = moe_peers_triton.read_rows_and_scalars(peers(hidden, ranks), None, routes)
    assert nothing is None and torch.equal(bare, rows)
    staged = []
    for exchange in (moe_peers_eager, moe_peers_triton):
        sums, by_choice = torch.zeros_like(hidden), torch.zeros_like(scalars)
        exchange.publish_token_sums(rows, row_scalars, routes.dest_row, sums, by_choice)
        assert_close(sums, moe_unpermute_eager(rows.double(), routes), 2)
        assert torch.equal(by_choice, scalars.where(routes.dest_row >= 0, 0))
        staged.append(sums)
    assert_close(staged[1], staged[0].double(), 2)


@few
@given(seeds, *cases, dtypes, st.booleans())
def test_sums_are_over_the_ranks_of_the_choices(
    _seed: object, ranks: int, slots: int, top_k: int, local_experts: int, width: int, dtype: torch.dtype, short: bool
) -> None:
    """A token is summed once over each rank whose experts it chose, whatever the memory of other ranks has."""
    chosen = chosen_by(slots - short, top_k, local_experts * ranks).long()
    staged = torch.randn(ranks, ranks * slots, width, device=DEVICE).to(dtype)
    scalars = torch.rand(ranks, ranks * slots, top_k, device=DEVICE)
    first = slots * (ranks - 1)
    given = peers(staged.flatten(0, 1), ranks), peers(scalars.flatten(0, 1), ranks)
    expected = torch.zeros(len(chosen), width, dtype=torch.float64, device=DEVICE)
    choice_scalars = torch.zeros(chosen.shape, device=DEVICE)
    for token, experts in enumerate(chosen.tolist()):
        for rank in sorted({expert // local_experts for expert in experts if expert >= 0}):
            expected[token] += staged[rank, first + token].double()
        for choice, expert in enumerate(experts):
            if expert >= 0:
                choice_scalars[token, choice] = scalars[expert // local_experts, first + token, choice]
    for exchange in (moe_peers_eager, moe_peers_triton):
        total, actual = exchange.read_token_sums_and_scalars(*given, chosen, first, local_experts)
        assert total.dtype == dtype and actual is not None
        assert_close(total, expected, 2)
        assert torch.equal(actual, choice_scalars)
        alone, nothing = exchange.read_token_sums_and_scalars(given[0], None, chosen, first, local_experts)
        assert nothing is None and torch.equal(alone, total)


@few
@given(seeds, *cases, dtypes, st.integers(0, 4))
def test_publish_and_limit_equal_plain_torch(
    _seed: object, ranks: int, slots: int, top_k: int, local_experts: int, width: int, dtype: torch.dtype, unused: int
) -> None:
    """
    Tokens, scalars and choices go to the first slots, and other slots get no choices; routes beyond the room are
    dropped, and NaN and the greatest number of rows report it.
    """
    tokens = max(0, slots - unused)
    hidden, scalars = torch.randn(tokens, width, device=DEVICE).to(dtype), torch.rand(tokens, top_k, device=DEVICE)
    chosen = chosen_by(tokens, top_k, local_experts).long()
    room, most = max(1, tokens * top_k - unused), torch.tensor([unused], dtype=torch.int32, device=DEVICE)
    actual: list[Any] = []
    for exchange in (moe_peers_eager, moe_peers_triton):
        shown = torch.zeros(slots, width, device=DEVICE).to(dtype), torch.zeros(slots, top_k, device=DEVICE)
        choices = torch.zeros(slots, top_k, dtype=torch.int32, device=DEVICE)
        exchange.write_tokens_to_slots([hidden, scalars, chosen], [*shown, choices])
        assert torch.equal(shown[0][:tokens], hidden) and torch.equal(shown[1][:tokens], scalars)
        assert torch.equal(choices[:tokens], chosen) and bool((choices[tokens:] == -1).all())
        bare = torch.zeros_like(shown[0])
        exchange.write_tokens_to_slots([hidden], [bare])
        assert torch.equal(bare, shown[0])
        own = most.clone()
        (dest, source, ends), lost = exchange.limit_routes_and_flag_overflow(
            moe_routes_eager(choices, local_experts), room, own
        )
        actual.append((dest, source, ends, lost.isnan(), own))
    assert all(torch.equal(result, reference) for result, reference in zip(*actual, strict=True))
    rows = int((chosen >= 0).sum())
    assert bool(actual[0][3]) == (rows > room) and int(actual[0][4]) == max(rows, unused)
    assert int(actual[0][0].max()) < room


def test_no_rows_give_empty_results() -> None:
    """Without rows or tokens on this rank, all operations of an exchange give empty tensors."""
    chosen = torch.full((4, 2), -1, dtype=torch.int32, device=DEVICE)
    hidden: Any = torch.randn(4, 8, device=DEVICE)
    routes = Routes(*moe_routes_eager(chosen, 2))
    routes = routes._replace(source_choice=routes.source_choice[:0])
    for exchange in (moe_peers_eager, moe_peers_triton):
        rows, _ = exchange.read_rows_and_scalars(peers(hidden, 2), None, routes)
        sums = torch.ones_like(hidden)
        exchange.publish_token_sums(rows, None, routes.dest_row, sums, None)
        assert rows.shape == (0, 8) and not sums.any()
        assert exchange.read_token_sums_and_scalars(peers(torch.cat([sums, sums]), 2), None, chosen[:0].long(), 2, 1)[
            0
        ].shape == (0, 8)
