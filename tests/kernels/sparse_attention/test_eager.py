"""An indexer's choice, scores and attention against loops over tokens and heads."""

import torch
from torch import Tensor

from drawloom.kernels.sparse_attention.eager import choose_keys_eager, sparse_attention_eager


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def score(queries: Tensor, keys: Tensor, factors: Tensor, row: int, token: int, key: int) -> Tensor:
    """Return a key's score for a token, summed head by head."""
    heads = zip(factors[row, token], queries[row, token], strict=True)
    return torch.stack([factor * (query @ keys[row, key]).clamp(min=0) for factor, query in heads]).sum()


def test_best_visible_keys_are_chosen() -> None:
    """A token chooses the best visible keys, or all if they are few; the choice's scores are the loop's."""
    queries, keys, factors = draw(2, 4, 6, 5), draw(2, 9, 5), draw(2, 4, 6)
    first = torch.tensor([[0, 0, 0, 6], [3, 3, 3, 3]], dtype=torch.int32)
    counts = torch.tensor([[6, 7, 8, 3], [1, 2, 5, 6]], dtype=torch.int32)
    choice, scores = choose_keys_eager(queries, keys, factors, first, counts, 4)
    for row in range(2):
        for token in range(4):
            begin, count = int(first[row, token]), int(counts[row, token])
            by_key = {key: score(queries, keys, factors, row, token, key) for key in range(begin, begin + count)}
            best = sorted(by_key, key=lambda key: -by_key[key])[:4]
            assert choice[row, token].tolist() == best + [-1] * (4 - len(best))
            expected = [*(float(by_key[key]) for key in best), *[-torch.inf] * (4 - len(best))]
            torch.testing.assert_close(scores[row, token].tolist(), expected)


def test_a_choice_has_its_size_with_fewer_keys() -> None:
    """With fewer keys than are chosen, a choice ends with -1."""
    bounds = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2, dtype=torch.int32)
    choice, scores = choose_keys_eager(draw(1, 2, 3, 5), draw(1, 2, 5), draw(1, 2, 3), *bounds, 4)
    assert choice.tolist() == [[[0, -1, -1, -1]] * 2]
    assert torch.equal(scores == -torch.inf, choice < 0)


def test_attention_is_over_chosen_keys() -> None:
    """Results, weights and gradients equal softmax attention to the chosen latents, token by token."""
    q, latents = draw(2, 3, 4, 7).requires_grad_(), draw(2, 6, 7).requires_grad_()
    choice = torch.tensor([[[5, 0, -1], [1, -1, -1], [4, 2, 3]], [[0, 1, 2], [3, -1, -1], [5, 4, -1]]])
    mixed, weights = sparse_attention_eager(q, latents, choice.int(), 5, 0.3)
    results = []
    for row in range(2):
        for token in range(3):
            chosen = latents[row, choice[row, token][choice[row, token] >= 0]]
            shares = (q[row, token] @ chosen.T * 0.3).softmax(-1)
            results.append(shares @ chosen[:, :5])
            sums = torch.zeros(3, dtype=torch.float64)
            sums[: len(chosen)] = shares.sum(0)
            torch.testing.assert_close(weights[row, token], sums)
    expected, seed = torch.stack(results).view(mixed.shape), torch.randn_like(mixed)
    torch.testing.assert_close(mixed, expected)
    actual, wanted = (torch.autograd.grad(result, (q, latents), seed) for result in (mixed, expected))
    torch.testing.assert_close(actual, wanted)
    assert not weights.requires_grad
