"""attention against a loop over rows, heads and tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from support.seeding import seeds


def by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor,
    window: int | None = None,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute every token's softmax over exactly the tokens that it may see."""
    rows, length, heads, width = q.shape
    scale = width**-0.5 if options.scale is None else options.scale
    result = q.new_zeros(rows, length, heads, v.shape[-1])
    for row in range(rows):
        for head in range(heads):
            key_head = head // (heads // k.shape[2])
            for token in range(length):
                first = 0 if window is None else max(0, token + 1 - window)
                seen = [past for past in range(first, token + 1) if document_ids[row, past] == document_ids[row, token]]
                scores = k[row, seen, key_head] @ q[row, token, head] * scale
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
                result[row, token, head] = scores.exp() / total @ v[row, seen, key_head]
    return result


def restride(x: Tensor) -> Tensor:
    """Return the same numbers in a tensor whose last dimension is not contiguous."""
    return x.transpose(1, -1).contiguous().transpose(1, -1) if x.ndim > 2 else x.T.contiguous().T


def random_case(rows: int, length: int, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q = torch.randn(rows, length, heads, 4, dtype=dtype)
    k, v = (torch.randn(rows, length, kv_heads, 4, dtype=dtype) for _ in range(2))
    return q, k, v, torch.randint(2, (rows, length)).cumsum(1)


@settings(max_examples=25)
@given(
    _seed=seeds,
    rows=st.integers(0, 2),
    length=st.integers(1, 9),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 10)),
)
def test_each_token_sees_its_document_up_to_itself(
    _seed: object, rows: int, length: int, kv_heads: int, group: int, window: int | None
) -> None:
    """For any packing, ratio of heads and window, the result equals a loop over tokens."""
    q, k, v, document_ids = random_case(rows, length, kv_heads * group, kv_heads, torch.float64)
    torch.testing.assert_close(
        attention_eager(q, k, v, create_causal_document_mask(document_ids, window)),
        by_token(q, k, v, document_ids, window),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_gradients_match_finite_differences(heads: int, kv_heads: int) -> None:
    """Gradients of q, k and v equal finite differences in float64, also with shared key heads."""
    *qkv, document_ids = random_case(2, 5, heads, kv_heads, torch.float64)
    for x in qkv:
        x.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention_eager(q, k, v, create_causal_document_mask(document_ids)), tuple(qkv)
    )


def test_empty_inputs_give_empty_results() -> None:
    """Without rows or tokens, result and gradients are empty."""
    for rows, length in ((0, 4), (2, 0)):
        q, k, v, document_ids = random_case(rows, length, 2, 1, torch.float32)
        q.requires_grad_()
        actual = attention_eager(q, k, v, create_causal_document_mask(document_ids))
        assert actual.shape == q.shape
        assert torch.autograd.grad(actual.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_float64(dtype: torch.dtype) -> None:
    """Half precision keeps its dtype and agrees with float64 up to rounding."""
    q, k, v, document_ids = random_case(2, 12, 4, 2, dtype)
    actual = attention_eager(q, k, v, create_causal_document_mask(document_ids))
    assert actual.dtype == dtype
    exact = by_token(q.double(), k.double(), v.double(), document_ids)
    torch.testing.assert_close(actual.double(), exact, atol=4 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)


def test_strided_inputs_give_the_same_result() -> None:
    """Views with a non-contiguous last dimension give the same results as copies."""
    q, k, v, document_ids = random_case(2, 6, 4, 2, torch.float64)
    actual = attention_eager(restride(q), restride(k), restride(v), create_causal_document_mask(restride(document_ids)))
    torch.testing.assert_close(actual, attention_eager(q, k, v, create_causal_document_mask(document_ids)))


def test_only_equality_of_document_ids_counts() -> None:
    """The order and size of document ids do not matter."""
    q, k, v, _ = random_case(1, 6, 2, 2, torch.float64)
    plain, odd = torch.tensor([[0, 0, 1, 1, 1, 2]]), torch.tensor([[7, 7, -3, -3, -3, 0]])
    torch.testing.assert_close(
        attention_eager(q, k, v, create_causal_document_mask(plain)),
        attention_eager(q, k, v, create_causal_document_mask(odd)),
    )


@settings(max_examples=25)
@given(
    _seed=seeds,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    v_dim=st.sampled_from([1, 4, 7]),
    scale=st.sampled_from([None, 0.7]),
    softcap=st.sampled_from([None, 0.5]),
    has_sinks=st.booleans(),
    window=st.sampled_from([None, 2]),
)
def test_options_and_sinks_change_every_score(
    _seed: object,
    kv_heads: int,
    group: int,
    v_dim: int,
    scale: float | None,
    softcap: float | None,
    has_sinks: bool,
    window: int | None,
) -> None:
    """For any scale, softcap, sinks and width of values, the result equals a loop over tokens."""
    q, k, _, document_ids = random_case(2, 7, kv_heads * group, kv_heads, torch.float64)
    v, options = torch.randn(2, 7, kv_heads, v_dim, dtype=torch.float64), AttentionOptions(scale, softcap)
    sinks = torch.randn(kv_heads * group, dtype=torch.float64) if has_sinks else None
    torch.testing.assert_close(
        attention_eager(q, k, v, create_causal_document_mask(document_ids, window), options, sinks),
        by_token(q, k, v, document_ids, window, options, sinks),
    )


def test_gradients_with_options_match_finite_differences() -> None:
    """Gradients of q, k, v and sinks equal finite differences, with a scale, a softcap and narrow values."""
    q, k, _, document_ids = random_case(2, 5, 4, 2, torch.float64)
    v, sinks = torch.randn(2, 5, 2, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    mask, options = create_causal_document_mask(document_ids), AttentionOptions(0.7, 0.9)
    inputs = tuple(x.requires_grad_() for x in (q, k, v, sinks))
    assert torch.autograd.gradcheck(lambda q, k, v, sinks: attention_eager(q, k, v, mask, options, sinks), inputs)


def test_a_softcap_must_be_positive() -> None:
    """A softcap of 0 or below is refused with its value."""
    with pytest.raises(ValueError, match=r"the softcap of attention is 0; write a number above 0, or None"):
        AttentionOptions(softcap=0)
