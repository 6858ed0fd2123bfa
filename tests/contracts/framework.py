"""Properties of ports that only drawloom itself implements, checked like contracts."""

import threading
import typing
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.contracts.experts import CHOICES, ENDS
from drawloom.components.contracts.model import _expect_close, _random_tensor
from drawloom.components.contracts.pipeline import VOCAB, _make_token_batch
from drawloom.components.contracts.run import ObservedState
from drawloom.components.ports.checkpoint import NodeState, Restorer, Stager
from drawloom.components.ports.data import MovableData, TokenBatch, TrainingData, ValidationData
from drawloom.components.ports.distributed import Device, Mesh, Precision, Processes, Reduce
from drawloom.components.ports.features import MemoryPolicy
from drawloom.components.ports.kernels import Kernels
from drawloom.components.ports.model import KeyValueCache, TokenContext
from drawloom.components.ports.pipeline import (
    Executor,
    create_step_state,
    sum_losses_and_weights,
)
from drawloom.components.ports.run import Batching, Event, EventKind, Events, Randomness, RunFolder, RunInfo, Step, Stop
from drawloom.components.ports.stages import AveragedWeights, Parameters, Stages, get_or_create_gradient
from drawloom.components.state.batch import Batch
from drawloom.graph.testing import expect
from drawloom.kernels.attention.options import AttentionOptions

STEPS = 3


def known_steps_count_from_1_and_have_numbers(node: Restorer) -> None:
    """Known steps are counted from 1, and their values are numbers or None."""
    for step, values in node.recorded_step_values():
        expect(type(step) is int and step >= 1, f"{step!r} is not a step")
        kinds = {type(value) for value in values.values()}
        expect(kinds <= {int, float, type(None)}, f"step {step} has values of {kinds}")


def a_saved_step_is_restored(restorer: Restorer) -> None:
    """Restore returns 0 without a checkpoint, and the step of the newest checkpoint after a save."""
    expect(restorer.restore() == 0, "without a checkpoint a step is restored")
    for index in (1, 2):
        restorer.save(Step(index, 10))
        restorer.keep_in_memory_for_joiners(Step(index, 10))
        restorer.wait_until_staged()
        restored = restorer.restore()
        expect(restored == index, f"step {index} was saved, and step {restored} is restored")


def a_step_may_be_saved_twice(restorer: Restorer) -> None:
    """A step can be saved twice."""
    for _ in range(2):
        restorer.save(Step(1, 10))
    expect(restorer.restore() == 1, "step 1 was saved twice, and is not restored")


def after_a_move_rows_continue_at_the_position(data: MovableData) -> None:
    """After a move to a position, the next step has the rows from this position on, as before."""
    start = data.next_row_position
    data.next_step()
    after = data.next_row_position
    expect(after > start, f"a step leaves the position at {after}")
    second = data.next_step()
    for position in (data.next_row_position, after):
        data.skip_to_position(position)
        expect(data.next_row_position == position, f"moved to {position} it is at {data.next_row_position}")
    again = data.next_step()
    is_same = all(_have_equal_tensors(a, b) for a, b in zip(second, again, strict=True))
    expect(is_same, "the rows at a position are others the second time")


def tokens_by_source_never_decrease(progress: MovableData) -> None:
    """From step to step, no source's tokens decrease, and the total increases."""
    counts = [progress.cumulative_tokens_by_source(step) for step in range(1, STEPS + 1)]
    for earlier, later in pairwise(counts):
        expect(all(tokens <= later[name] for name, tokens in earlier.items()), f"{earlier} tokens become {later}")
        expect(sum(earlier.values()) < sum(later.values()), f"a step has no tokens: {earlier} and {later}")


def device_allocates_tensors_and_counts_memory(device: Device) -> None:
    """The device can allocate tensors, its backend is gloo or nccl, and its memory in use is at least 0."""
    tensor = torch.zeros(2, device=device.device)
    expect(tensor.device.type == device.device.type, f"a tensor is on {tensor.device}")
    expect(device.backend in ("gloo", "nccl"), f"the backend is {device.backend!r}")
    expect(device.get_peak_memory_so_far() >= 0, f"{device.get_peak_memory_so_far()} bytes are in use")


def dimension_sizes_multiply_to_the_world_size(mesh: Mesh) -> None:
    """The dimension sizes multiply to the world size, and every index is below its size."""
    sizes, indices = attrs.asdict(mesh.sizes), attrs.asdict(mesh.indices)
    dense = mesh.sizes.without_expert_dimensions()
    expect(prod(dense.values()) == mesh.world.size, f"{dense} are not {mesh.world.size} ranks")
    for name, size in sizes.items():
        expect(0 <= indices[name] < size, f"this rank has index {indices[name]} along {name}")


def groups_match_dimensions(mesh: Mesh) -> None:
    """A dimension's group has the dimension's size, and this rank's index is its rank in the group."""
    indices = mesh.indices.without_expert_dimensions()
    for name, size in mesh.sizes.without_expert_dimensions().items():
        group = mesh.group(name)
        expect((group.rank, group.size) == (indices[name], size), f"the group of {name} does not match it")


def all_dtypes_are_floating_point(precision: Precision) -> None:
    """All dtypes are floating-point, and sums over ranks are at least as wide as float32."""
    for name in ("parameter", "compute", "gradient", "reduce"):
        dtype = getattr(precision, name)
        expect(isinstance(dtype, torch.dtype) and dtype.is_floating_point, f"{name} is {dtype}")
    expect(precision.reduce.itemsize >= 4, f"sums are in {precision.reduce}")


def ranks_are_below_their_counts(processes: Processes) -> None:
    """Rank and node rank are from 0 to below their counts."""
    expect(0 <= processes.rank < processes.world_size, f"rank {processes.rank} is not below {processes.world_size}")
    node = processes.node_rank, processes.node_count
    expect(0 <= node[0] < node[1] <= processes.world_size, f"node rank {node[0]} is not below {node[1]}")


def group_has_the_ranks_of_the_set_with_this_rank(processes: Processes) -> None:
    """Among several sets, the group is the set that contains this rank, with this rank's index in it."""
    world = list(range(processes.world_size))
    together = processes.make_group("together", [world])
    expect(
        (together.rank, together.size) == (processes.rank, len(world)),
        "the group of all ranks is another",
    )
    alone = processes.make_group("alone", [[rank] for rank in world])
    expect((alone.rank, alone.size) == (0, 1), "the group of one rank is another")
    expect(alone.gather_json({"a": [1, None]}) == [{"a": [1, None]}], "a group of one rank gathers another value")


def total_and_maximum_are_at_least_the_local_values(reduce: Reduce) -> None:
    """
    The total and the maximum of nonnegative values keep shape and float64, and are at least this rank's values.

    The total is linear, and the maximum is at most the total.
    """
    values = torch.tensor([1.0, 2.0, 1e-9], dtype=torch.float64)
    total, twice = reduce.sum_over_ranks(values.clone()), reduce.sum_over_ranks(2 * values)
    expect(total.dtype == torch.float64 and total.shape == values.shape, f"the total is {total.dtype} {total.shape}")
    expect(bool((total >= values).all()) and torch.allclose(twice, 2 * total), "the total is not a sum")
    largest = reduce.max_over_ranks(values.clone())
    expect(bool((largest >= values).all() and (largest <= total).all()), "the largest is not a maximum")


def without_edges_there_are_no_channels(neighbours: Mesh) -> None:
    """There are no channels without edges, because channels lead only to the other ends of edges."""
    channels = neighbours.open_channels([])
    expect(len(channels) == 0, f"there are channels to {sorted(channels)} without an edge")


def swiglu_halves_follows_its_formula(kernels: Kernels) -> None:
    """Swiglu is applied to both halves, gate first, and multiplied by the rows' scales."""
    both, scale = _random_tensor(5, 16), _random_tensor(5)
    gate, up = both.double().chunk(2, -1)
    _expect_close(kernels.swiglu_halves(both), gate * gate.sigmoid() * up)
    _expect_close(kernels.swiglu_halves(both, scale), gate * gate.sigmoid() * up * scale.double()[:, None])


def rows_are_sorted_by_expert(kernels: Kernels) -> None:
    """A choice has a row in the range of its expert, with the token and the choice's probability."""
    x, probabilities = _random_tensor(4, 8), _random_tensor(4, 2)
    routes = kernels.moe_routes(CHOICES, 3)
    ends = routes.offsets.tolist()
    expect(ends == ENDS, f"the rows of experts end at {ends}, not at {ENDS}")
    rows, chances = kernels.moe_permute(x, probabilities, routes)
    for token, choice in (CHOICES >= 0).nonzero().tolist():
        row, expert = int(routes.dest_row[token, choice]), int(CHOICES[token, choice])
        expect([0, *ENDS][expert] <= row < ENDS[expert], f"a choice of expert {expert} has row {row}")
        _expect_close(rows[row], x[token])
        _expect_close(chances[row], probabilities[token, choice])


def rows_are_summed_by_token(kernels: Kernels) -> None:
    """The result for a token is the sum of its choices' rows, times probabilities if given; dropped choices add 0."""
    x, probabilities = _random_tensor(4, 8), _random_tensor(4, 2)
    routes = kernels.moe_routes(CHOICES, 3)
    rows, _ = kernels.moe_permute(x, probabilities, routes)
    chosen = (CHOICES >= 0).double()
    _expect_close(kernels.moe_unpermute(rows, routes), x.double() * chosen.sum(1, keepdim=True))
    weights = (chosen * probabilities.double()).sum(1, keepdim=True)
    _expect_close(kernels.moe_unpermute(rows, routes, probabilities), x.double() * weights)


def a_dropped_choice_needs_no_row(kernels: Kernels) -> None:
    """Routes that end after the choices that are not dropped produce and add exactly as many rows."""
    x, probabilities = _random_tensor(4, 8), _random_tensor(4, 2)
    routes = kernels.moe_routes(CHOICES, 3)
    routes = routes._replace(source_choice=routes.source_choice[: ENDS[-1]])
    rows, scale = kernels.moe_permute(x, probabilities, routes)
    expect((len(rows), len(scale)) == (ENDS[-1], ENDS[-1]), f"of {ENDS[-1]} choices, {len(rows)} rows are made")
    weights = ((CHOICES >= 0).double() * probabilities.double()).sum(1, keepdim=True)
    _expect_close(kernels.moe_unpermute(rows * scale[:, None], routes), x.double() * weights)


def rows_are_multiplied_by_their_experts_matrix(kernels: Kernels) -> None:
    """A row is multiplied by the matrix of its expert, or by the transposed matrix; an expert may have no rows."""
    weight, offsets = _random_tensor(3, 8, 16), torch.tensor([2, 2, 5], dtype=torch.int32)
    expert_of_row = torch.tensor([0, 0, 2, 2, 2])
    for x, transposed in ((_random_tensor(5, 8), False), (_random_tensor(5, 16), True)):
        matrices = weight.double()[expert_of_row]
        wanted = torch.einsum("ri,roi->ro" if transposed else "ri,rio->ro", x.double(), matrices)
        _expect_close(kernels.grouped_gemm(x, weight, offsets, transposed), wanted)


def rms_norm_follows_its_formula(kernels: Kernels) -> None:
    """The result is x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    x, weight = _random_tensor(3, 5, 16), _random_tensor(16)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    _expect_close(kernels.rms_norm(x, weight, 1e-6), wanted)


def swiglu_follows_its_formula(kernels: Kernels) -> None:
    """The result is gate * sigmoid(gate) * up."""
    gate, up = _random_tensor(3, 5, 16), _random_tensor(3, 5, 16)
    _expect_close(kernels.swiglu(gate, up), gate.double() * gate.double().sigmoid() * up.double())


def rope_rotates_pairs_of_channels(kernels: Kernels) -> None:
    """Channel pairs, from both halves in a head, are rotated by their angles."""
    x, angles = _random_tensor(2, 5, 3, 8), _random_tensor(2, 5, 4)
    cos, sin = angles.cos().double()[:, :, None], angles.sin().double()[:, :, None]
    first, second = x.double().chunk(2, -1)
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    _expect_close(kernels.rope(x, angles.cos(), angles.sin()), wanted)


def attention_is_causal_within_documents(kernels: Kernels) -> None:
    """
    Attention is a softmax over earlier tokens in the same document, and head groups share keys and values.

    The mask for rows of one document (`one_document_per_row`) has the same result.
    """
    q, k, v = _random_tensor(2, 6, 4, 8), _random_tensor(2, 6, 2, 8), _random_tensor(2, 6, 2, 8)
    one = torch.zeros(2, 6, dtype=torch.int64)
    known = kernels.attention_mask(one, one_document_per_row=True)
    _expect_close(kernels.attention(q, k, v, known), kernels.attention(q, k, v, kernels.attention_mask(one)).double())
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    k64, v64 = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("rihd,rjhd->rhij", q.double(), k64) / 8**0.5
    mask = torch.ones(6, 6, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    result = kernels.attention(q, k, v, kernels.attention_mask(documents))
    _expect_close(result, torch.einsum("rhij,rjhd->rihd", weights, v64))


def attention_supports_scale_softcap_and_sinks(kernels: Kernels) -> None:
    """
    Scores have a scale and a softcap, sinks are scores for keys without values, and values have any width.

    A mask for whole rows and one for documents have the same result for rows of one document.
    """
    q, k, v, sinks = (
        _random_tensor(2, 6, 4, 8),
        _random_tensor(2, 6, 2, 8),
        _random_tensor(2, 6, 2, 12),
        _random_tensor(4),
    )
    documents = torch.zeros(2, 6, dtype=torch.int64)
    k64, v64 = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = 2 * torch.tanh(torch.einsum("rihd,rjhd->rhij", q.double(), k64) * 0.3 / 2)
    scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    with_sinks = torch.cat([scores, sinks.double()[None, :, None, None].expand(2, 4, 6, 1)], -1)
    wanted = torch.einsum("rhij,rjhd->rihd", with_sinks.softmax(-1)[..., :-1], v64)
    for one_document_per_row in (False, True):
        mask = kernels.attention_mask(documents, one_document_per_row=one_document_per_row)
        _expect_close(kernels.attention(q, k, v, mask, AttentionOptions(0.3, 2.0), sinks), wanted)


def attention_over_cached_parts_equals_attention_over_the_text(kernels: Kernels) -> None:
    """
    Attention over parts of a text with a key-value cache equals attention over the whole text.

    The last part is a fixed pass, whose keys behind the text are hidden.
    """
    q, k, v, sinks = (
        _random_tensor(2, 6, 4, 8),
        _random_tensor(2, 6, 2, 8),
        _random_tensor(2, 6, 2, 5),
        _random_tensor(4),
    )
    documents, cache, device = torch.zeros(2, 6, dtype=torch.int64), KeyValueCache(9), torch.device("cpu")
    options = AttentionOptions(0.5)
    layers = [(k, None, None), (2 * k, 3, sinks)]  # the second has a window and sinks
    wanted = [
        kernels.attention(q, keys, v, kernels.attention_mask(documents, window), options, sinks)
        for keys, window, sinks in layers
    ]
    for part in (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)):
        if part.start == 5:
            cache.begin_fixed_pass(device)
        for whole, (keys, window, layer_sinks) in zip(wanted, layers, strict=True):
            mask = kernels.attention_mask(documents[:, part], window, cache=cache)
            actual = kernels.attention(q[:, part], keys[:, part], v[:, part], mask, options, layer_sinks)
            _expect_close(actual, whole[:, part].double())
        cache.end_pass(part.stop - part.start)


def linear_cross_entropy_is_weighted_negative_log_softmax(kernels: Kernels) -> None:
    """
    The loss is -log softmax(hidden @ weight.T) at the target, times the token's weight; 0 for ignored targets.

    The second result is the logits' log-sum-exp (lse).
    """
    hidden, weight, targets = _random_tensor(3, 4, 8), _random_tensor(11, 8), torch.arange(12).reshape(3, 4) % 11
    targets[0, 1] = -100  # IGNORE_INDEX
    logarithms = (hidden.double() @ weight.double().T).log_softmax(-1)
    wanted = -logarithms.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == -100, 0.0)
    token_weights = torch.arange(12.0).reshape(3, 4)
    for argument, factors in ((None, torch.ones(3, 4)), (token_weights, token_weights)):
        losses, lse = kernels.linear_cross_entropy(hidden, weight, targets, argument)
        _expect_close(losses, wanted * factors)
        _expect_close(lse, (hidden.double() @ weight.double().T).logsumexp(-1))


def zero_rows_yield_zero_rows(kernels: Kernels) -> None:
    """A kernel accepts zero rows, and returns zero rows."""
    expect(
        kernels.swiglu(_random_tensor(0, 16), _random_tensor(0, 16)).shape == (0, 16), "zero rows give another shape"
    )


def _expect_same_sums(sums: Tensor, expected: Tensor, when: str) -> None:
    expect(sums.shape == (2,) and sums.dtype == torch.float64, f"the sums are {sums.dtype} of shape {sums.shape}")
    is_close = torch.allclose(sums, expected, rtol=1e-4)
    expect(is_close, f"{when}, loss and weight are {sums.tolist()} and not {expected.tolist()}")


def _train_and_sum_losses_and_weights(executor: Executor, batches: Sequence[TokenBatch]) -> Tensor:
    """Return the sums of losses and weights from a training pass, float64 (2,)."""
    state = create_step_state(batches)
    executor.run_forward_and_backward(state)
    return sum_losses_and_weights(state)


def _evaluate_and_sum_losses_and_weights(executor: Executor, batches: Sequence[TokenBatch]) -> Tensor:
    """Return the sums of losses and weights from an evaluation, float64 (2,)."""
    state = create_step_state(batches)
    executor.evaluate(state)
    return sum_losses_and_weights(state)


def training_and_evaluation_have_equal_losses(executor: Executor) -> None:
    """Training and evaluation on the same microbatches have the same loss and weight."""
    sums = _train_and_sum_losses_and_weights(executor, [_make_token_batch()])
    expect(bool(sums[0].isfinite()), f"the loss is {sums[0].item()}")
    _expect_same_sums(_evaluate_and_sum_losses_and_weights(executor, [_make_token_batch()]), sums, "evaluated")


def dividing_a_batch_does_not_change_its_sums(executor: Executor) -> None:
    """Dividing a batch into microbatches does not change its sums."""
    whole, parts = [_make_token_batch()], [_make_token_batch().take_rows(slice(row, row + 1)) for row in range(4)]
    _expect_same_sums(
        _evaluate_and_sum_losses_and_weights(executor, parts),
        _evaluate_and_sum_losses_and_weights(executor, whole),
        "in four microbatches",
    )
    _expect_same_sums(
        _train_and_sum_losses_and_weights(executor, parts),
        _train_and_sum_losses_and_weights(executor, whole),
        "trained in four microbatches",
    )


def evaluation_can_be_repeated(executor: Executor) -> None:
    """A second evaluation has the same sums, and an evaluation without microbatches has sums of 0."""
    first, second, empty = (
        _evaluate_and_sum_losses_and_weights(executor, batches)
        for batches in ([_make_token_batch()], [_make_token_batch()], [])
    )
    _expect_same_sums(second, first, "evaluated again")
    expect(not empty.any(), "without microbatches there is a loss")


def _predict_logits(predictor: Executor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return the logits for tokens; empty on a rank without logits."""
    shared = TokenContext(torch.arange(6).repeat(len(tokens), 1), torch.zeros_like(tokens))
    if documents is not None:
        shared = attrs.evolve(shared, document_ids=documents)
    logits = predictor.infer(tokens, shared)
    if logits is None:
        return torch.empty(*tokens.shape, 0)
    expect(logits.ndim == 3 and logits.shape[:2] == tokens.shape, f"logits have the shape {tuple(logits.shape)}")
    return logits


def logits_do_not_depend_on_later_tokens(predictor: Executor) -> None:
    """Logits depend on the token and on earlier tokens in its row, and not on later tokens."""
    tokens = torch.arange(12).reshape(2, 6) % VOCAB
    changed = tokens.clone()
    changed[0, 3] = (tokens[0, 3] + 1) % VOCAB
    before, after = _predict_logits(predictor, tokens), _predict_logits(predictor, changed)
    expect(torch.allclose(before[0, :3], after[0, :3], atol=1e-4), "a later token changes the logits of earlier ones")
    expect(torch.allclose(before[1], after[1], atol=1e-4), "a token changes the logits of another row")
    is_unchanged = before.numel() > 0 and torch.allclose(before[0, 3], after[0, 3])
    expect(not is_unchanged, "a token does not change its own logits")


def logits_do_not_depend_on_other_documents(predictor: Executor) -> None:
    """Logits do not depend on other documents in the row."""
    tokens, documents = torch.arange(6)[None] % VOCAB, torch.tensor([[0, 0, 0, 1, 1, 1]])
    changed = torch.where(documents == 0, (tokens + 1) % VOCAB, tokens)
    before, after = _predict_logits(predictor, tokens, documents), _predict_logits(predictor, changed, documents)
    expect(torch.allclose(before[0, 3:], after[0, 3:], atol=1e-4), "a document changes the logits of the next")


def microbatch_results_are_equal_together_or_alone(passes: Executor) -> None:
    """Every microbatch's number comes with `finish`'s result for its own hidden states, however many run together."""
    rows = [torch.tensor([[1, 2, 3, 4]]), torch.tensor([[4, 3, 2, 1]])]
    inputs = [(row, TokenContext(torch.arange(4)[None], torch.zeros_like(row))) for row in rows]
    together: dict[int, Tensor] = {}
    passes.infer_microbatches(inputs, together.__setitem__, lambda hidden, head: head.logits(hidden))
    expect(sorted(together) == [0, 1], f"the microbatches 0 and 1 come as {sorted(together)}")
    for number, alone in enumerate(inputs):
        result: dict[int, Tensor] = {}
        passes.infer_microbatches([alone], result.__setitem__, lambda hidden, head: head.logits(hidden))
        difference = float((result[0] - together[number]).abs().max())
        expect(difference < 1e-5, f"microbatch {number} alone differs by {difference:.2g}")


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 2]])


def _make_recurrence_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = _random_tensor(2, 6, 2, 8), _random_tensor(2, 6, 2, 8) / 3, _random_tensor(2, 6, 4, 5)
    return q, k, v, -_random_tensor(2, 6, 4).abs(), _random_tensor(2, 6, 4).sigmoid()


def convolution_is_causal_within_documents(kernels: Kernels) -> None:
    """The result is the weighted sum over a token and earlier tokens in its document, or SiLU of the sum."""
    x, weight = _random_tensor(2, 6, 3), _random_tensor(3, 4)
    wanted = x.double() * weight[:, 3].double()
    for lag in (1, 2, 3):
        is_same = (DOCUMENTS[:, lag:] == DOCUMENTS[:, :-lag])[..., None]
        wanted[:, lag:] += (x[:, :-lag] * weight[:, 3 - lag] * is_same).double()
    mask = kernels.recurrence_mask(DOCUMENTS)
    _expect_close(kernels.causal_conv(x, weight, mask), wanted * wanted.sigmoid())
    _expect_close(kernels.causal_conv(x, weight, mask, silu=False), wanted)


def states_follow_the_gated_delta_rule(kernels: Kernels) -> None:
    """A loop over every document's tokens has the same result; two value heads share a key head."""
    q, k, v, g, beta = (x.double() for x in _make_recurrence_inputs())
    wanted = torch.zeros_like(v)
    for row, head in ((row, head) for row in range(2) for head in range(4)):
        state = torch.zeros(8, 5, dtype=torch.float64)
        for token in range(6):
            if token and DOCUMENTS[row, token] != DOCUMENTS[row, token - 1]:
                state = torch.zeros_like(state)
            key, decayed = k[row, token, head // 2], g[row, token, head].exp() * state
            state = decayed + beta[row, token, head] * torch.outer(key, v[row, token, head] - decayed.T @ key)
            wanted[row, token, head] = state.T @ q[row, token, head // 2]
    q, k, v, g, beta = _make_recurrence_inputs()
    _expect_close(kernels.gated_delta_rule(q, k, v, g, beta, kernels.recurrence_mask(DOCUMENTS)), wanted)


def results_for_cached_parts_equal_the_whole_texts(kernels: Kernels) -> None:
    """Both operations on parts, with cached states, equal the results for the whole text."""
    (q, k, v, g, beta), x, weight = _make_recurrence_inputs(), _random_tensor(2, 6, 3), _random_tensor(3, 4)
    documents, cache = torch.zeros(2, 6, dtype=torch.int64), KeyValueCache(6)
    mask = kernels.recurrence_mask(documents)
    mixed, convolved = kernels.gated_delta_rule(q, k, v, g, beta, mask), kernels.causal_conv(x, weight, mask)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        mask = kernels.recurrence_mask(documents[:, part], cache=cache)
        _expect_close(kernels.causal_conv(x[:, part], weight, mask), convolved[:, part].double())
        actual = kernels.gated_delta_rule(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], mask)
        _expect_close(actual, mixed[:, part].double())
        cache.end_pass(part.stop - part.start)


def microbatches_have_exactly_the_rows_of_a_step(batching: Batching) -> None:
    """Microbatches on all data-parallel ranks are exactly the rows in a step, and steps follow without gaps."""
    expect(batching.first_row_position(1) == 0, f"the first step begins at position {batching.first_row_position(1)}")
    expect(0 <= batching.dp_rank < batching.dp_size, f"dp_rank {batching.dp_rank} is not below {batching.dp_size}")
    for step in (1, 2, 3):
        rows = len(batching.microbatch_row_positions(step)) * batching.micro_size * batching.dp_size
        size = batching.first_row_position(step + 1) - batching.first_row_position(step)
        expect(rows == size, f"microbatches have {rows} rows in a step of {size}")


def every_position_is_used_once(batching: Batching) -> None:
    """A rank's positions are in the step's range in the endless order, without repetition."""
    for step in (1, 2, 3):
        microbatches = batching.microbatch_row_positions(step)
        positions = [position for microbatch in microbatches for position in microbatch]
        sizes = {len(microbatch) for microbatch in microbatches}
        expect(sizes == {batching.micro_size}, f"step {step} has microbatches of other sizes")
        inside = range(batching.first_row_position(step), batching.first_row_position(step + 1))
        expect(all(position in inside for position in positions), f"step {step} uses positions of another")
        expect(len(set(positions)) == len(positions), f"step {step} uses a position twice")


def _draw_numbers(randomness: Randomness, *purpose: str | int) -> list[float]:
    return torch.rand(4, generator=randomness.stream(*purpose)).tolist()


def streams_depend_only_on_the_purpose(one: Randomness, other: Randomness) -> None:
    """Earlier draws do not change the numbers for a purpose."""
    first = _draw_numbers(one, "dropout", 3)
    _draw_numbers(other, "something else")
    torch.rand(7)
    expect(
        _draw_numbers(other, "dropout", 3) == first == _draw_numbers(one, "dropout", 3),
        "earlier draws change the numbers of a purpose",
    )


def different_purposes_have_different_numbers(randomness: Randomness) -> None:
    """Different purposes have different numbers, even if they look alike."""
    purposes: list[tuple[str | int, ...]] = [("a",), ("b",), ("a", 1), ("a", 2), ("a", "1"), ("a1",), (1, "a")]
    draws = [tuple(_draw_numbers(randomness, *purpose)) for purpose in purposes]
    expect(len(set(draws)) == len(draws), "two purposes give the same numbers")


def folder_is_writable(folder: RunFolder) -> None:
    """The run folder exists, and a file can be written in it."""
    expect(folder.folder.is_dir(), f"{folder.folder} is not a folder")
    probe = folder.folder / "written by a contract"
    probe.write_text("x", "utf-8")
    probe.unlink()


def run_name_seed_and_path_do_not_change(job: RunInfo) -> None:
    """The run has a name, a seed and a path, and none of them changes."""
    expect(isinstance(job.name, str) and job.name, "the run has no name")
    expect(isinstance(job.seed, int) and isinstance(job.folder_path, Path), "the run has no seed, or no path")
    expect((job.name, job.seed, job.folder_path) == (job.name, job.seed, job.folder_path), "the run's identity changes")


def without_a_signal_the_run_continues(stop: Stop) -> None:
    """Without a signal, `agree_on_signal` returns 0."""
    expect([stop.agree_on_signal(), stop.agree_on_signal()] == [0, 0], "the run is asked to stop")


def an_agreed_stop_reason_is_one_ranks_own(stop: Stop) -> None:
    """The reason is a rank's own words, and empty if no rank has one."""
    agreed = [stop.agree_on_reason(reason) for reason in ("", "enough", "")]
    expect(agreed == ["", "enough", ""], f"ranks agree on {agreed}")


def emitting_events_does_not_change_the_step(events: Events) -> None:
    """Events can be emitted at any time, and do not change their step."""
    for kind in reversed(typing.get_args(EventKind)):
        state = ObservedState({"tokens": 64.0, "loss": 1.5})
        step = Step(1, 2, state)
        events.emit(Event(kind))
        events.emit(Event(kind, step, "optimizer"))
        expect(step.index == 1 and step.state is state and not state.written, f"{kind} changes the step")


def parameters_have_unique_names(parameters: Parameters) -> None:
    """A parameter has one name, the order of parameters does not change, and none is on the meta device."""
    named = parameters.named_parameters()
    expect(named, "there are no parameters")
    expect(len({name for name, _ in named}) == len(named), "two parameters have one name")
    expect(len({id(parameter) for _, parameter in named}) == len(named), "a parameter has two names")
    expect([name for name, _ in parameters.named_parameters()] == [name for name, _ in named], "the order changes")
    for name, parameter in named:
        expect(
            isinstance(parameter, nn.Parameter) and not parameter.is_meta,
            f"{name} is on the meta device, or not an nn.Parameter",
        )


def stages_are_ordered_and_not_on_the_meta_device(stages: Stages) -> None:
    """This rank has ordered stages with the same count, and their modules are not on the meta device."""
    numbers = [stage.index for stage in stages.local]
    expect(numbers and numbers == sorted(set(numbers)), f"this rank's stages are {numbers}")
    expect(len({stage.count for stage in stages.local}) == 1, "stages disagree on how many there are")
    for stage in stages.local:
        expect(0 <= stage.index < stage.count, f"stage {stage.index} is not below the count {stage.count}")
        expect(
            not any(parameter.is_meta for parameter in stage.module.parameters()),
            f"stage {stage.index} is on the meta device",
        )


def a_rank_owns_a_subset_in_order(parameters: Parameters) -> None:
    """The parameters that count on a rank are a subsequence of its named parameters."""
    named = [id(parameter) for _, parameter in parameters.named_parameters()]
    owned = [id(parameter) for _, parameter in parameters.owned_parameters()]
    expect(
        [key for key in named if key in owned] == owned,
        "owned_parameters() lists other names than named_parameters(), or reorders them",
    )


def gradients_are_summed_over_ranks(parameters: Parameters) -> None:
    """Gradients are ones before, and afterwards the count of ranks with the parameter."""
    for _, parameter in parameters.named_parameters():
        get_or_create_gradient(parameter).fill_(1)
    parameters.sum_remaining_gradients()
    for name, parameter in parameters.named_parameters():
        gradient = get_or_create_gradient(parameter)
        ranks = float(gradient.flatten()[0])
        expect(ranks >= 1 and ranks.is_integer(), f"the gradients of {name}, ones on each rank, add up to {ranks}")
        expect(bool((gradient == ranks).all()), f"the gradient of {name} is summed in part")


def layers_use_changed_master_weights(stages: Stages) -> None:
    """Casting does not change master weights; after an in-place change to a master weight, layers use the new value."""
    for only_if_changed in (False, True):
        masters = [parameter for stage in stages.local for _, parameter in stage.named_masters_or_parameters()]
        before = [parameter.detach().clone() for parameter in masters]
        for copies in stages.weight_copies:
            copies.before_passes(only_if_changed)
        expect(all(map(torch.equal, masters, before)), "casting changes a parameter")
        with torch.no_grad():
            for parameter in {id(parameter): parameter for parameter in masters}.values():
                parameter.add_(1)
        for copies in stages.weight_copies:
            copies.before_passes(only_if_changed)
        for stage in stages.local:
            compute = dict(stage.module.named_parameters())
            for name, parameter in stage.named_masters_or_parameters():
                is_same = torch.equal(compute[name], parameter.to(compute[name].dtype))
                expect(is_same, f"after a change of {name} layers still compute with the old one")


def compute_gradients_become_master_gradients(stages: Stages) -> None:
    """Compute weights' gradients become the master weights'."""
    for stage in stages.local:
        for parameter in stage.module.parameters():
            get_or_create_gradient(parameter).fill_(1)
    for copies in stages.weight_copies:
        copies.after_backward()
    for stage in stages.local:
        for name, parameter in stage.named_masters_or_parameters():
            expect(parameter.grad is not None, f"{name} gets no gradient")
            expect(bool((get_or_create_gradient(parameter) == 1).all()), f"the gradient of {name} is changed")


def first_stage_input_is_a_meta_tensor_like_tokens(inputs: Stages) -> None:
    """The first stage's input is a meta tensor with the tokens' shape and dtype."""
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    spec = inputs.infer_stage_inputs(0, tokens, TokenContext(torch.arange(5).repeat(2, 1), torch.zeros_like(tokens)))
    expect(isinstance(spec, torch.Tensor) and spec.is_meta, "the input of the first stage is not on the meta device")
    expect(
        (spec.shape, spec.dtype) == (tokens.shape, tokens.dtype),
        f"the first stage takes {spec.dtype} {tuple(spec.shape)} for tokens {tokens.dtype} {tuple(tokens.shape)}",
    )


def _make_state(value: float) -> NodeState:
    whole = torch.full((4, 6), value)
    # a view and its base, like a tied or sharded parameter
    return {"whole": whole, "nested": {"view": whole[1:, ::2], "step": 3, "name": "a", "none": None, "list": [1, 2]}}


def _stage_and_wait(stager: Stager, state: NodeState) -> dict[str, Any]:
    result = stager.stage(state)
    copied = result.result(60) if isinstance(result, Future) else result
    stager.synchronize_staging()
    return copied


def _expect_state_filled_with(copied: dict[str, Any], value: float, when: str) -> None:
    state = _make_state(value)
    for copy, tensor in ((copied["whole"], state["whole"]), (copied["nested"]["view"], state["nested"]["view"])):
        expect(copy.shape == tensor.shape, f"{when}, a tensor has the shape {tuple(copy.shape)}")
        expect(bool((copy == tensor).all()), f"{when}, a tensor has other values than the state had")
    for name in ("step", "name", "none", "list"):
        leaf = copied["nested"][name]
        expect(leaf == state["nested"][name], f"{when}, {name} is {leaf!r}")


def the_staged_copy_equals_the_state(stager: Stager) -> None:
    """A staged copy has the structure, shapes and values of the state."""
    _expect_state_filled_with(_stage_and_wait(stager, _make_state(1.0)), 1.0, "staged")


def the_state_may_change_after_staging(stager: Stager) -> None:
    """If the stager copies, a change of the state after `synchronize_staging` does not change the copy."""
    state = _make_state(1.0)
    copied = _stage_and_wait(stager, state)
    state["whole"].fill_(2.0)
    _expect_state_filled_with(copied, 1.0 if stager.makes_copies else 2.0, "after a change of the state")


def a_copy_in_use_is_not_overwritten(stager: Stager) -> None:
    """Later copies do not reuse the memory of a copy while any of its tensors is alive."""
    states = [_make_state(float(number)) for number in range(3)]
    copies = [_stage_and_wait(stager, state) for state in states]
    for number, copied in enumerate(copies):
        _expect_state_filled_with(copied, float(number), "after later copies")


def staging_an_uncopyable_value_raises_type_error(stager: Stager) -> None:
    """Staging a lock, which can't be copied, raises TypeError, unless the stager copies nothing."""
    if not stager.makes_copies:
        return
    try:
        _stage_and_wait(stager, {"a": {"lock": threading.Lock()}})
    except TypeError:
        return
    expect(False, "a lock in the state raises no TypeError")


def equal_settings_yield_equal_microbatches(one: TrainingData, other: TrainingData) -> None:
    """Two loaders with the same settings return the same microbatches at every step."""
    for step in range(STEPS):
        first, second = one.next_step(), other.next_step()
        expect(first and len(first) == len(second), f"step {step + 1} has {len(first)} and {len(second)} microbatches")
        is_same = all(_have_equal_tensors(a, b) for a, b in zip(first, second, strict=True))
        expect(is_same, f"step {step + 1} differs between two loaders with the same settings")


def consecutive_steps_have_different_data(data: TrainingData) -> None:
    """Two consecutive steps have different data."""
    first, second = data.next_step(), data.next_step()
    same = len(first) == len(second) and all(_have_equal_tensors(a, b) for a, b in zip(first, second, strict=True))
    expect(not same, "the second step has the data of the first")


def microbatches_have_at_most_the_counted_rows(data: ValidationData) -> None:
    """The microbatches have at most the counted rows, and these are at most all the split's rows."""
    used, count = data.count_evaluated_and_total_rows()
    rows = sum(batch.row_count for batch in data.batches())
    expect(0 < rows <= used <= count, f"{rows} rows in microbatches, {used} of {count} by its own count")


def two_passes_yield_equal_microbatches(one: ValidationData, other: ValidationData) -> None:
    """A second pass has the same microbatches in the same order."""
    first = [*one.batches()]
    expect(first, "there are no microbatches")
    for again in ([*one.batches()], [*other.batches()]):
        same = len(again) == len(first) and all(map(_have_equal_tensors, first, again))
        expect(same, "a second pass has other microbatches")


def _have_equal_tensors(one: Batch, other: Batch) -> bool:
    """Return whether two batches have equal tensors."""
    first, second = one.tensors(), other.tensors()
    return len(first) == len(second) and all(map(torch.equal, first, second))


def the_choice_is_made_once_and_names_known_stages(policy: MemoryPolicy) -> None:
    """
    Every stage has a policy, offloaded stages are among them, fractions are from 0 to 1, and a second call returns the
    same.
    """
    choice = policy.choose()
    stages = set(range(len(choice.recompute)))
    expect(stages, "there are no stages")
    expect(choice.offloaded <= stages, f"stages {sorted(choice.offloaded - stages)} are offloaded and do not exist")
    expect(choice.host_states, "there are no ranks")
    expect(all(0 <= part <= 1 for part in choice.host_states), f"fractions of the state are {choice.host_states}")
    expect(policy.choose() == choice, "the same question has two answers")


def averages_do_not_change_while_they_replace_weights(average: AveragedWeights) -> None:
    """Averages do not change while they replace the weights or afterwards, even if their user fails."""
    before = {name: tensor.clone() for name, tensor in average.averages().items()}
    for fails in (False, True):
        try:
            with average.use_averages():
                for name, tensor in average.averages().items():
                    expect(torch.equal(tensor, before[name]), f"the average of {name} changes when it is used")
                if fails:
                    raise InterruptedError
        except InterruptedError:
            pass
        after = average.averages()
        has_same_names = before.keys() == after.keys()
        is_same = has_same_names and all(torch.equal(after[name], tensor) for name, tensor in before.items())
        expect(is_same, "averages change when they are used")


FRAMEWORK_ONLY = {
    "AveragedWeights": "it puts its averages in place of the stages' parameters",
    "Batching": "all arithmetic with batch sizes is in one component",
    "DescribedStages": "its phrases are about a run's model and features",
    "Device": "every other component relies on its device and its backend",
    "EndsAnswers": "its ids belong to a chat template and a tokenizer of the run",
    "EpochCounter": "it counts the loader's rows",
    "Events": "it sends all events of a run to its listeners",
    "Executor": "it runs programs on the stages, features and losses of a run",
    "FrozenModel": "it has weights and stages on the ranks of a run",
    "Kernels": "its operations belong to the kernels in drawloom.kernels",
    "MemoryPolicy": "its choice follows from a plan of all stages and ranks",
    "Mesh": "every parallel dimension relies on its groups",
    "MovableData": "its position belongs to the order of rows in the loader",
    "Parameters": "it names the stages' parameters",
    "PassFeature": "it acts around the programs of an executor",
    "PassObserver": "it observes the passes of a run's step",
    "Precision": "its dtypes belong to the stages and optimizers",
    "Processes": "it owns the process groups and ends processes",
    "Randomness": "it owns the random generators of the process",
    "Reduce": "its sums depend on how stages divide parameters among ranks",
    "Restorer": "it restores all nodes of a run and the processes that join it",
    "RewardEvaluation": "a run's other components complete and reward",
    "RowLimit": "it needs several ranks with different tokens",
    "RunFolder": "it holds the lock of the run folder",
    "RunInfo": "it is the identity of the run",
    "Scorer": "its hidden states have a width that only the run's model knows",
    "Stager": "it copies the tensors of a checkpointer's snapshot, as torch's async_save does",
    "Stages": "it has the model's modules on the ranks of a run",
    "Stop": "it owns the signal handlers of the process",
    "TeacherPredictions": "it belongs to the rows of one packing",
    "TrainingData": "a run divides its batches among the ranks, and resumes at its position",
    "ValidationData": "a run divides its rows among the ranks",
}
"""Ports without a contract, with the reason: plugins do not implement them, so drawloom's own tests check them."""
