"""Cut cross entropy in Triton against the eager implementation in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.cross_entropy.cut import NeededGradients, cut_cross_entropy_eager, sort_vocabulary_by_mean_logit
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.triton import cut_cross_entropy_triton
from drawloom.kernels.deferral import Deferral
from drawloom.kernels.triton import tma
from support.cross_entropy import random_targets
from support.kernels import DEVICE, assert_all_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds


def losses_of(*inputs: Any, **options: Any) -> Tensor:
    """Return the losses alone."""
    losses, _ = cut_cross_entropy_triton(*inputs, **options)
    return losses


def eager_losses(*inputs: Any, **options: Any) -> Tensor:
    """Return the eager implementation's losses."""
    losses, _ = cut_cross_entropy_eager(*inputs, **options)
    return losses


@few
@given(
    seeds,
    st.lists(st.integers(0, 12), max_size=2),
    st.integers(1, 90),
    st.integers(1, 300),
    dtypes,
    layouts,
    layouts,
    st.sampled_from([1, 2**28]),
)
def test_triton_equals_eager(
    _seed: object,
    shape: list[int],
    width: int,
    words: int,
    dtype: torch.dtype,
    of_hidden: str,
    of_weight: str,
    at_once: int,
) -> None:
    """Any shape and strides, in one chunk or many, agree with float64 in losses and gradients."""
    hidden = draw_tensor(of_hidden, *shape, width, dtype=dtype)
    weight = draw_tensor(of_weight, words, width, dtype=dtype, scale=width**-0.5)
    cut, targets = LogitCut(max_logits=at_once), random_targets(tuple(shape), words)
    wide, grad = exact(hidden, weight), torch.rand(shape).to(DEVICE)
    actual, expected = (
        losses_of(hidden, weight, targets, cut),
        eager_losses(wide[0], wide[1], targets, cut),
    )
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(actual, (hidden, weight), grad)
    assert [g.dtype for g in grads] == [dtype, dtype]
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 4)


@few
@given(seeds, st.integers(1, 40), st.integers(1, 70), st.sampled_from([1e-3, 0.02, 0.1]), st.booleans())
def test_the_filter_skips_the_tiles_that_eager_skips(
    _seed: object, tokens: int, words: int, filter_eps: float, chunked: bool
) -> None:
    """With a filter, Triton skips the same tiles as the eager implementation."""
    hidden, weight = draw_tensor("contiguous", tokens, 20), draw_tensor("contiguous", words, 20)
    targets, wide = random_targets((tokens,), words), exact(hidden, weight)
    cut = LogitCut(filter_eps=filter_eps, tile=(16, 16), max_logits=1 if chunked else 2**20)
    expected, *near = (
        gradients(eager_losses, wide, targets, replace(cut, filter_eps=filter_eps * factor))
        for factor in (1, 0.9999, 1.0001)
    )
    assume(torch.equal(sort_vocabulary_by_mean_logit(hidden, weight), sort_vocabulary_by_mean_logit(*wide)))
    assume(all(torch.equal(*pair) for other in near for pair in zip(expected, other, strict=True)))
    # A logit is off by roundings of its own size, and so is the logarithm of a probability.
    largest = (wide[0] @ wide[1].T).abs().max().item()
    assert_all_close(gradients(losses_of, (hidden, weight), targets, cut), expected, 2 * max(1, largest))


@few
@given(seeds, st.integers(1, 40), st.sampled_from([0.0, 1e-3]), st.sampled_from([1, 2**28]))
def test_a_word_that_has_no_rival_has_no_gradient(
    _seed: object, tokens: int, filter_eps: float, max_logits: int
) -> None:
    """The probability of a single word is exactly 1 if both passes compute the same logit."""
    hidden, weight = draw_tensor("contiguous", tokens, 20), draw_tensor("contiguous", 1, 20)
    cut = LogitCut(filter_eps=filter_eps, tile=(16, 16), max_logits=max_logits)
    for gradient in gradients(losses_of, (hidden, weight), torch.zeros(tokens, dtype=torch.int64, device=DEVICE), cut):
        assert not gradient.any()


def gradients(compute: Any, inputs: tuple[Tensor, Tensor], targets: Tensor, cut: LogitCut) -> tuple[Tensor, ...]:
    return torch.autograd.grad(compute(*inputs, targets, cut).sum(), inputs)


@few
@given(
    seeds,
    st.integers(1, 40),
    st.integers(1, 90),
    st.integers(1, 12),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 1e-3]),
    st.sampled_from([1, 2**28]),
)
def test_tma_equals_eager(
    _seed: object, tokens: int, words: int, width: int, dtype: torch.dtype, filter_eps: float, max_logits: int
) -> None:
    """Blocks beyond the last token, word or channel agree with float64 in losses and gradients."""
    hidden = draw_tensor("contiguous", tokens, 8 * width, dtype=dtype)
    weight = draw_tensor("contiguous", words, 8 * width, dtype=dtype, scale=0.2)
    targets, wide = random_targets((tokens,), words), exact(hidden, weight)
    cut = LogitCut(filter_eps=filter_eps, tile=(16, 16), max_logits=max_logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tma, "is_supported", lambda device: True)
        actual = losses_of(hidden, weight, targets, cut)
        result = torch.autograd.grad(actual.sum(), (hidden, weight))
    expected = eager_losses(*wide, targets, cut)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    # So near to uniform, every tile of 16 by 16 holds a probability above the filter's bound.
    assert_all_close(result, torch.autograd.grad(expected.sum(), wide), 4)


def test_many_tiles_give_the_whole() -> None:
    """More tokens and words than a tile, with a width that no step divides, give the whole."""
    hidden, weight = draw_tensor("contiguous", 150, 130), draw_tensor("contiguous", 600, 130, scale=0.1)
    targets, wide = random_targets((150,), 600), exact(hidden, weight)
    actual, expected = (
        losses_of(hidden, weight, targets),
        eager_losses(wide[0], wide[1], targets),
    )
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    assert_all_close(torch.autograd.grad(actual.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), wide), 8)


def test_large_logits_do_not_overflow() -> None:
    """Logits in the thousands do not overflow."""
    hidden = (1000 * torch.eye(3, 20, device=DEVICE)).requires_grad_()
    weight, targets = (5 * torch.eye(30, 20, device=DEVICE)).requires_grad_(), torch.tensor([0, 5, 2], device=DEVICE)
    actual = losses_of(hidden, weight, targets)
    torch.testing.assert_close(actual.cpu(), torch.tensor([0.0, 5000.0, 0.0]))
    grads = torch.autograd.grad(actual.sum(), (hidden, weight))
    assert all(grad.isfinite().all() for grad in grads)


def test_a_target_outside_of_the_vocabulary_gives_nan() -> None:
    """A target beyond the vocabulary gives NaN, and not the loss of another word."""
    hidden, weight = draw_tensor("contiguous", 3, 16), draw_tensor("contiguous", 20, 16)
    losses = losses_of(hidden, weight, torch.tensor([3, 20, -100], device=DEVICE))
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("trained", [NeededGradients(True, False), NeededGradients(False, True)])
@pytest.mark.parametrize("filter_eps", [0.0, 1e-3])
def test_a_frozen_input_leaves_the_other_gradient_unchanged(trained: NeededGradients, filter_eps: float) -> None:
    """With one input frozen, the other's gradient is the same."""
    hidden, weight = draw_tensor("contiguous", 5, 16), draw_tensor("contiguous", 20, 16)
    targets, cut = random_targets((5,), 20), LogitCut(filter_eps=filter_eps, tile=(16, 16))
    both = torch.autograd.grad(losses_of(hidden, weight, targets, cut).sum(), (hidden, weight))
    inputs: Any = [x.detach().requires_grad_(wants) for x, wants in zip((hidden, weight), trained, strict=True)]
    index = trained.index(True)
    (actual,) = torch.autograd.grad(losses_of(inputs[0], inputs[1], targets, cut).sum(), inputs[index])
    assert torch.equal(actual, both[index])


def test_weight_gradient_can_be_deferred() -> None:
    """A deferred weight gradient is bitwise equal to an immediate one."""
    hidden, weight, targets = (
        draw_tensor("contiguous", 7, 16),
        draw_tensor("contiguous", 20, 16),
        random_targets((7,), 20),
    )
    expected = torch.autograd.grad(losses_of(hidden, weight, targets).sum(), (hidden, weight))
    deferral = Deferral()
    with deferral:
        losses = losses_of(hidden, weight, targets)
    with deferral.defer():
        actual = torch.autograd.grad(losses.sum(), (hidden, weight), allow_unused=True)
    assert actual[1] is None
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(deferral.take_queued_gradients()[0].drain_and_return_remaining_grad(), expected[1])


def test_gradients_are_deterministic() -> None:
    """Gradients are bitwise the same in a second run, with a filter and without."""
    hidden, weight, targets = (
        draw_tensor("contiguous", 40, 16),
        draw_tensor("contiguous", 50, 16),
        random_targets((40,), 50),
    )
    for cut in (LogitCut(), LogitCut(filter_eps=0.01, tile=(16, 16))):
        runs = [torch.autograd.grad(losses_of(hidden, weight, targets, cut).sum(), (hidden, weight)) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_pass_opcheck() -> None:
    """Both operators pass torch.library.opcheck, which torch.compile relies on."""
    hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(20, 16, device=DEVICE)
    targets, numbers = random_targets((5,), 20), torch.rand(5, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.cut_cross_entropy.default, (hidden, weight, targets, 16, 32, 64))
    arguments = (hidden, weight, targets, numbers, numbers, numbers, 0.0, 16, 16, 2**20, True, True)
    torch.library.opcheck(torch.ops.drawloom.cut_cross_entropy_backward.default, arguments)


def test_the_padding_of_the_gradients_of_logits_reaches_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in unwritten memory reaches no gradient; torch's bfloat16 matmul on a CPU reads beyond the end of a row."""
    new_empty: Any = Tensor.new_empty

    def new_empty_with_nan(self: Tensor, *size: Any, **options: Any) -> Any:
        memory = new_empty(self, *size, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(Tensor, "new_empty", new_empty_with_nan)
    hidden = draw_tensor("contiguous", 17, 24, dtype=torch.bfloat16)
    weight = draw_tensor("contiguous", 33, 24, dtype=torch.bfloat16)
    actual = cut_cross_entropy_triton(hidden, weight, random_targets((17,), 33))
    grads = torch.autograd.grad(actual, (hidden, weight), [torch.ones(17, device=DEVICE)] * 2)
    assert all(grad.isfinite().all() for grad in grads)


@few
@given(
    seeds,
    st.integers(0, 40),
    st.integers(1, 90),
    dtypes,
    st.sampled_from([0.0, 1e-3]),
    st.sampled_from([1, 2**28]),
)
def test_gradients_flow_through_losses_and_lse(
    _seed: object, tokens: int, words: int, dtype: torch.dtype, filter_eps: float, max_logits: int
) -> None:
    """With factors on losses and lse, filtered or not, gradients equal the eager implementation's."""
    hidden = draw_tensor("contiguous", tokens, 24, dtype=dtype)
    weight = draw_tensor("contiguous", words, 24, dtype=dtype, scale=0.2)
    cut = LogitCut(max_logits=max_logits, filter_eps=filter_eps, tile=(16, 16))
    targets, wide = random_targets((tokens,), words), exact(hidden, weight)
    factors = torch.rand(tokens, device=DEVICE), torch.rand(tokens, device=DEVICE)
    actual = cut_cross_entropy_triton(hidden, weight, targets, cut)
    expected = cut_cross_entropy_eager(wide[0], wide[1], targets, cut)
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result.double(), reference, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(actual, (hidden, weight), factors)
    exact_grads = torch.autograd.grad(expected, wide, [factor.double() for factor in factors])
    # So near to uniform, every tile of 16 by 16 holds a probability above the filter's bound.
    assert_all_close(grads, exact_grads, 4)
