"""Cut cross entropy in Triton against the eager one in float64, which is tested against its definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.cut_cross_entropy import LogitCut, Needs, cut_cross_entropy_eager, order_of_vocab
from drawloom.kernels.deferred_grads import Deferral
from drawloom.kernels.triton import tma
from drawloom.kernels.triton.cut_cross_entropy import cut_cross_entropy_triton
from support.kernels import DEVICE, assert_all_close, drawn, dtypes, exact, few, layouts
from support.seeding import seeds


def losses_of(*inputs: Any, **options: Any) -> Tensor:
    """The losses alone."""
    losses, _ = cut_cross_entropy_triton(*inputs, **options)
    return losses


def eager_losses(*inputs: Any, **options: Any) -> Tensor:
    """The losses alone, of the eager twin."""
    losses, _ = cut_cross_entropy_eager(*inputs, **options)
    return losses


def targets_of(shape: tuple[int, ...], words: int) -> Tensor:
    targets = torch.randint(words, shape)
    targets.view(-1)[::4] = -100
    return targets.to(DEVICE)


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
def test_equals_eager(
    _seed: object,
    shape: list[int],
    width: int,
    words: int,
    dtype: torch.dtype,
    of_hidden: str,
    of_weight: str,
    at_once: int,
) -> None:
    """Any shape and strides, in one chunk or many, give losses and gradients of float64."""
    hidden = drawn(of_hidden, *shape, width, dtype=dtype)
    weight = drawn(of_weight, words, width, dtype=dtype, scale=width**-0.5)
    cut, targets = LogitCut(max_logits=at_once), targets_of(tuple(shape), words)
    wide, grad = exact(hidden, weight), torch.rand(shape).to(DEVICE)
    found, expected = (
        losses_of(hidden, weight, targets, cut),
        eager_losses(wide[0], wide[1], targets, cut),
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(found, (hidden, weight), grad)
    assert [g.dtype for g in grads] == [dtype, dtype]
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 4)


@few
@given(seeds, st.integers(1, 40), st.integers(1, 70), st.sampled_from([1e-3, 0.02, 0.1]), st.booleans())
def test_filters_as_eager(_seed: object, tokens: int, words: int, least: float, chunked: bool) -> None:
    """With a filter, the tiles that are left out are those that the eager twin leaves out."""
    hidden, weight = drawn("contiguous", tokens, 20), drawn("contiguous", words, 20)
    targets, wide = targets_of((tokens,), words), exact(hidden, weight)
    cut = LogitCut(filter_eps=least, tile=(16, 16), max_logits=1 if chunked else 2**20)
    expected, *near = (
        gradients(eager_losses, wide, targets, replace(cut, filter_eps=least * factor))
        for factor in (1, 0.9999, 1.0001)
    )
    assume(torch.equal(order_of_vocab(hidden, weight), order_of_vocab(*wide)))
    assume(all(torch.equal(*pair) for other in near for pair in zip(expected, other, strict=True)))
    # A logit is off by roundings of its own size, and so is the logarithm of a probability.
    largest = (wide[0] @ wide[1].T).abs().max().item()
    assert_all_close(gradients(losses_of, (hidden, weight), targets, cut), expected, 2 * max(1, largest))


@few
@given(seeds, st.integers(1, 40), st.sampled_from([0.0, 1e-3]), st.sampled_from([1, 2**28]))
def test_a_word_that_has_no_rival_has_no_gradient(_seed: object, tokens: int, least: float, max_logits: int) -> None:
    """Its probability is 1 whatever its logit, exactly, if both passes compute the same logit."""
    hidden, weight = drawn("contiguous", tokens, 20), drawn("contiguous", 1, 20)
    cut = LogitCut(filter_eps=least, tile=(16, 16), max_logits=max_logits)
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
    _seed: object, tokens: int, words: int, width: int, dtype: torch.dtype, least: float, max_logits: int
) -> None:
    """Blocks that reach behind the last token, word or channel give losses and gradients of float64."""
    hidden = drawn("contiguous", tokens, 8 * width, dtype=dtype)
    weight = drawn("contiguous", words, 8 * width, dtype=dtype, scale=0.2)
    targets, wide = targets_of((tokens,), words), exact(hidden, weight)
    cut = LogitCut(filter_eps=least, tile=(16, 16), max_logits=max_logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tma, "is_there", lambda device: True)
        found = losses_of(hidden, weight, targets, cut)
        ours = torch.autograd.grad(found.sum(), (hidden, weight))
    expected = eager_losses(*wide, targets, cut)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    # So near to uniform, every tile of 16 by 16 holds a probability above the filter's bound.
    assert_all_close(ours, torch.autograd.grad(expected.sum(), wide), 4)


def test_many_tiles() -> None:
    """More tokens and words than one tile holds, of a width that no step divides, give the whole."""
    hidden, weight = drawn("contiguous", 150, 130), drawn("contiguous", 600, 130, scale=0.1)
    targets, wide = targets_of((150,), 600), exact(hidden, weight)
    found, expected = (
        losses_of(hidden, weight, targets),
        eager_losses(wide[0], wide[1], targets),
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert_all_close(torch.autograd.grad(found.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), wide), 8)


def test_far_logits() -> None:
    """Logits in the thousands overflow nothing."""
    hidden = (1000 * torch.eye(3, 20, device=DEVICE)).requires_grad_()
    weight, targets = (5 * torch.eye(30, 20, device=DEVICE)).requires_grad_(), torch.tensor([0, 5, 2], device=DEVICE)
    found = losses_of(hidden, weight, targets)
    torch.testing.assert_close(found.cpu(), torch.tensor([0.0, 5000.0, 0.0]))
    grads = torch.autograd.grad(found.sum(), (hidden, weight))
    assert all(grad.isfinite().all() for grad in grads)


def test_a_target_that_does_not_exist() -> None:
    """It gives NaN, and not the loss of another word."""
    hidden, weight = drawn("contiguous", 3, 16), drawn("contiguous", 20, 16)
    losses = losses_of(hidden, weight, torch.tensor([3, 20, -100], device=DEVICE))
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("wanted", [Needs(True, False), Needs(False, True)])
@pytest.mark.parametrize("least", [0.0, 1e-3])
def test_only_what_is_wanted(wanted: Needs, least: float) -> None:
    """With one input frozen, the other's gradient is the same."""
    hidden, weight = drawn("contiguous", 5, 16), drawn("contiguous", 20, 16)
    targets, cut = targets_of((5,), 20), LogitCut(filter_eps=least, tile=(16, 16))
    both = torch.autograd.grad(losses_of(hidden, weight, targets, cut).sum(), (hidden, weight))
    inputs: Any = [x.detach().requires_grad_(wants) for x, wants in zip((hidden, weight), wanted, strict=True)]
    place = wanted.index(True)
    (found,) = torch.autograd.grad(losses_of(inputs[0], inputs[1], targets, cut).sum(), inputs[place])
    assert torch.equal(found, both[place])


def test_weight_gradient_can_be_deferred() -> None:
    """A deferred gradient of the weight has the bits of an immediate one."""
    hidden, weight, targets = drawn("contiguous", 7, 16), drawn("contiguous", 20, 16), targets_of((7,), 20)
    expected = torch.autograd.grad(losses_of(hidden, weight, targets).sum(), (hidden, weight))
    deferral = Deferral()
    with deferral:
        losses = losses_of(hidden, weight, targets)
    with deferral.defer():
        found = torch.autograd.grad(losses.sum(), (hidden, weight), allow_unused=True)
    assert found[1] is None
    assert torch.equal(found[0], expected[0])
    assert torch.equal(deferral.take()[0].compute(), expected[1])


def test_same_gradients_each_time() -> None:
    """Gradients are bitwise the same in a second run, with a filter and without."""
    hidden, weight, targets = drawn("contiguous", 40, 16), drawn("contiguous", 50, 16), targets_of((40,), 50)
    for cut in (LogitCut(), LogitCut(filter_eps=0.01, tile=(16, 16))):
        runs = [torch.autograd.grad(losses_of(hidden, weight, targets, cut).sum(), (hidden, weight)) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_is_an_operation_of_torch() -> None:
    """Both directions keep the promises that torch.compile relies on."""
    hidden, weight = torch.randn(5, 16, device=DEVICE), torch.randn(20, 16, device=DEVICE)
    targets, numbers = targets_of((5,), 20), torch.rand(5, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.cut_cross_entropy.default, (hidden, weight, targets, 16, 32, 64))
    arguments = (hidden, weight, targets, numbers, numbers, numbers, 0.0, 16, 16, 2**20, True, True)
    torch.library.opcheck(torch.ops.drawloom.cut_cross_entropy_backward.default, arguments)


def test_the_padding_of_the_gradients_of_logits_reaches_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing wrote holds NaN here; torch's bfloat16 matmul on a CPU reads behind the end of a row."""
    new_empty: Any = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **options: Any) -> Any:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    hidden = drawn("contiguous", 17, 24, dtype=torch.bfloat16)
    weight = drawn("contiguous", 33, 24, dtype=torch.bfloat16)
    found = cut_cross_entropy_triton(hidden, weight, targets_of((17,), 33))
    grads = torch.autograd.grad(found, (hidden, weight), [torch.ones(17, device=DEVICE)] * 2)
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
def test_gradients_of_both_results(
    _seed: object, tokens: int, words: int, dtype: torch.dtype, filter_eps: float, max_logits: int
) -> None:
    """With factors on losses and on lse, filtered or not, gradients are those of the eager twin."""
    hidden = drawn("contiguous", tokens, 24, dtype=dtype)
    weight = drawn("contiguous", words, 24, dtype=dtype, scale=0.2)
    cut = LogitCut(max_logits=max_logits, filter_eps=filter_eps, tile=(16, 16))
    targets, wide = targets_of((tokens,), words), exact(hidden, weight)
    factors = torch.rand(tokens, device=DEVICE), torch.rand(tokens, device=DEVICE)
    found = cut_cross_entropy_triton(hidden, weight, targets, cut)
    expected = cut_cross_entropy_eager(wide[0], wide[1], targets, cut)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(found, (hidden, weight), factors)
    exact_grads = torch.autograd.grad(expected, wide, [factor.double() for factor in factors])
    # So near to uniform, every tile of 16 by 16 holds a probability above the filter's bound.
    assert_all_close(grads, exact_grads, 4)
