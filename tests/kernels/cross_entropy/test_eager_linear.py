"""linear_cross_entropy against its definition, in one chunk or several."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drawloom.kernels.cross_entropy import eager
from drawloom.kernels.cross_entropy.eager import linear_cross_entropy_eager
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.deferral import Deferral
from support.cross_entropy import exact_losses


def losses_of(*inputs: Any, **options: Any) -> Tensor:
    """Return the losses alone."""
    losses, _ = linear_cross_entropy_eager(*inputs, **options)
    return losses


@pytest.fixture(params=[None, 1, 3, 4], ids=["one chunk", "chunks of 1", "chunks of 3", "chunks of 4"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the chunk size of the kernel: its own (all tokens here), or a small one."""
    if request.param is not None:
        monkeypatch.setattr(eager, "MIN_CHUNK_TOKENS", request.param)
        monkeypatch.setattr(eager, "MIN_CHUNK_LOGITS", 0)


def random_case(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(7, shape)
    targets.view(-1)[::3] = -100
    return torch.randn(*shape, 5, dtype=dtype), torch.randn(7, 5, dtype=dtype), targets


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("shape", [(), (8,), (2, 5), (0,), (3, 0)])
def test_losses_equal_the_definition(shape: tuple[int, ...]) -> None:
    """Any shape, also without tokens, gives each token's loss in float32, and 0 for ignored tokens."""
    hidden, weight, targets = random_case(shape)
    actual = losses_of(hidden, weight, targets)
    assert actual.shape == targets.shape
    assert actual.dtype == torch.float32
    assert (actual[targets == -100] == 0).all()
    torch.testing.assert_close(actual.double(), exact_losses(hidden, weight, targets), atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("shape", [(8,), (2, 5), (0,)])
def test_gradients_match_finite_differences(shape: tuple[int, ...]) -> None:
    """Both gradients equal finite differences in float64."""
    hidden, weight, targets = random_case(shape, torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: losses_of(h, w, targets), (hidden, weight))


@pytest.mark.usefixtures("chunk")
def test_frozen_inputs_get_no_gradient() -> None:
    """With the weight frozen the gradient of the hidden states is the same, and the other way round."""
    hidden, weight, targets = random_case((9,))
    both = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad(losses_of(*both, targets).sum(), both)
    alone = hidden.clone().requires_grad_()
    (actual,) = torch.autograd.grad(losses_of(alone, weight, targets).sum(), alone)
    torch.testing.assert_close(actual, expected[0])
    alone = weight.clone().requires_grad_()
    (actual,) = torch.autograd.grad(losses_of(hidden, alone, targets).sum(), alone)
    torch.testing.assert_close(actual, expected[1])


def test_ignored_tokens_have_no_gradient() -> None:
    """The loss of an ignored token has no gradient, even if the incoming gradient is infinite."""
    hidden, weight, targets = random_case((6,))
    hidden.requires_grad_()
    losses = losses_of(hidden, weight, targets)
    grad = torch.ones(6).masked_fill(targets == -100, float("inf"))
    (actual,) = torch.autograd.grad(losses, hidden, grad)
    assert actual.isfinite().all()
    assert (actual[targets == -100] == 0).all()


def test_the_ignored_index_can_be_chosen() -> None:
    """The number that marks ignored targets can be chosen."""
    hidden, weight, _ = random_case((4,))
    targets = torch.tensor([0, 1, 2, 0])
    actual = losses_of(hidden, weight, targets, LogitCut(ignore_index=0))
    torch.testing.assert_close(actual.double(), exact_losses(hidden, weight, targets, 0), atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_float64(dtype: torch.dtype) -> None:
    """Losses of half-precision inputs are float32, gradients have the inputs' dtype; both agree with float64."""
    hidden, weight, targets = random_case((10,), dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    actual, exact = losses_of(hidden, weight, targets), exact_losses(hidden, weight, targets)
    assert actual.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), exact, atol=8 * eps, rtol=4 * eps)
    grads = torch.autograd.grad(actual.sum(), (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(exact.sum(), (hidden, weight)), atol=16 * eps, rtol=8 * eps)


def test_weight_gradient_does_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many chunks a bfloat16 weight's gradient keeps growing: a bfloat16 sum would stop at 256 times a part."""
    monkeypatch.setattr(eager, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(eager, "MIN_CHUNK_LOGITS", 0)
    hidden, weight = torch.ones(1000, 3).bfloat16(), torch.zeros(2, 3).bfloat16().requires_grad_()
    losses = losses_of(hidden, weight, torch.zeros(1000, dtype=torch.int64))
    (grad,) = torch.autograd.grad(losses.sum(), weight)
    torch.testing.assert_close(grad.float(), torch.tensor([[-500.0], [500.0]]).expand(2, 3))


def test_strided_inputs_give_the_same_result() -> None:
    """Transposed hidden states, weight and targets give what their copies give, backwards too."""
    hidden = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (3, 4))
    actual = losses_of(hidden.transpose(0, 1), weight.T, targets.T)
    exact = exact_losses(hidden.transpose(0, 1), weight.T, targets.T)
    torch.testing.assert_close(actual, exact)
    expected = torch.autograd.grad(exact.sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), (hidden, weight)), expected)


def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass allocates a tensor as large as all logits if there are several chunks."""
    monkeypatch.setattr(eager, "MIN_CHUNK_TOKENS", 64)
    monkeypatch.setattr(eager, "MIN_CHUNK_LOGITS", 0)
    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LargestTensor() as largest:
        losses = losses_of(hidden, weight, torch.randint(1000, (512,)))
        torch.autograd.grad(losses.sum(), (hidden, weight))
    assert largest.elements == 64 * 1000


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that records the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("chunked", [False, True], ids=["one chunk", "chunks"])
def test_weight_gradient_can_be_deferred(tokens: int, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deferred weight gradient is bitwise equal to an immediate one, whether all logits are kept or none."""
    if chunked:
        monkeypatch.setattr(eager, "MIN_CHUNK_TOKENS", 2)
        monkeypatch.setattr(eager, "MIN_CHUNK_LOGITS", 0)
    hidden, weight, targets = random_case((tokens,))
    tensors = hidden.requires_grad_(), weight.requires_grad_()
    grad = torch.randn(tokens)
    expected = torch.autograd.grad(losses_of(*tensors, targets), tensors, grad)
    deferral = Deferral()
    with deferral:
        actual = losses_of(*tensors, targets)
    with deferral.defer():
        grads = torch.autograd.grad(actual, tensors, grad, allow_unused=True)
    waiting = deferral.take_queued_gradients()
    assert len(waiting) == 1
    assert torch.equal(grads[0], expected[0])
    found_weight: Any = waiting[0].drain_and_return_remaining_grad() if waiting else grads[1]
    assert torch.equal(found_weight, expected[1])


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("shape", [(), (8,), (2, 5), (0,), (3, 0)])
def test_lse_equals_the_definition(shape: tuple[int, ...]) -> None:
    """The second result is float32 log-sum-exp of every token's logits, whether its target is ignored or not."""
    hidden, weight, targets = random_case(shape)
    _, lse = linear_cross_entropy_eager(hidden, weight, targets)
    assert lse.shape == targets.shape and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), (hidden.double() @ weight.double().T).logsumexp(-1), atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("outputs", ["losses", "lse", "both"])
def test_gradients_flow_through_losses_and_lse(outputs: str) -> None:
    """Gradients through losses, through lse and through both equal autograd's gradients of the definition."""
    hidden, weight, targets = random_case((2, 5), torch.float64)
    tensors = hidden.requires_grad_(), weight.requires_grad_()
    grad_losses, grad_lse = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    actual = linear_cross_entropy_eager(*tensors, targets)
    exact = exact_losses(*tensors, targets), (hidden @ weight.T).logsumexp(-1)
    wanted = [outputs in ("losses", "both"), outputs in ("lse", "both")]
    totals = [
        sum((x * factor).sum() for x, factor, want in zip(pair, (grad_losses, grad_lse), wanted, strict=True) if want)
        for pair in (actual, exact)
    ]
    grads, expected = (torch.autograd.grad(total, tensors) for total in totals)  # type: ignore[arg-type]
    torch.testing.assert_close(grads, expected)


def test_losses_are_multiplied_by_token_weights() -> None:
    """Token weights multiply losses and their gradients, but not lse; they get no gradient, as in larger chunks."""
    hidden, weight, targets = random_case((2, 5))
    weights = torch.rand(2, 5, requires_grad=True)
    hidden.requires_grad_()
    plain, lse = linear_cross_entropy_eager(hidden, weight, targets)
    actual, same_lse = linear_cross_entropy_eager(hidden, weight, targets, token_weights=weights)
    assert torch.equal(actual, plain * weights) and torch.equal(lse, same_lse)
    expected = torch.autograd.grad((plain * weights).sum(), hidden)
    grad, none = torch.autograd.grad(actual.sum(), (hidden, weights), allow_unused=True)
    torch.testing.assert_close(grad, *expected)
    assert none is None
