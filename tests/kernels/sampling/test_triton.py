"""Draws from logits in Triton against float64 mathematics."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.sampling.eager import draw_ids_eager
from drawloom.kernels.sampling.triton import TILE, draw_ids_triton
from support.kernels import DEVICE


def make_logits(rows: int, words: int, dtype: torch.dtype) -> Tensor:
    """Return logits with impossible words, in slices from wider rows."""
    logits = torch.randn(rows, words + 3, device=DEVICE) * 3
    logits[:, ::5] = -torch.inf
    return logits.to(dtype)[:, 1 : words + 1]


@pytest.mark.parametrize("temperature", [None, 0.6])
@pytest.mark.parametrize("words", [7, TILE, 2 * TILE + 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_draws_by_the_exact_distribution(words: int, dtype: torch.dtype, temperature: float | None) -> None:
    """Ids, log-probabilities and entropies follow the float64 distribution, also at both ends of the interval."""
    logits, uniforms = make_logits(9, words, dtype), torch.rand(9, dtype=torch.float64, device=DEVICE)
    uniforms[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    divisor = None if temperature is None else torch.tensor(temperature, device=DEVICE)
    ids, logps, entropies = draw_ids_triton(logits, uniforms, divisor).unbind(1)
    exact = (logits.double() / (temperature or 1)).log_softmax(-1)
    probabilities, cumulative = exact.exp(), exact.exp().cumsum(-1)
    chosen = ids.long()[:, None]
    above, probability, logp = (x.gather(-1, chosen)[:, 0] for x in (cumulative, probabilities, exact))
    assert bool((probability > 0).all())
    assert bool((above - probability < uniforms + 1e-6).all()) and bool((above > uniforms - 1e-6).all())
    torch.testing.assert_close(logps, logp, rtol=2e-6, atol=2e-6)
    entropy = -(exact.exp() * exact).nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(entropies, entropy, rtol=1e-5, atol=1e-5)


def test_rows_are_drawn_like_alone() -> None:
    """A row's draw has the same bits beside other rows; a tile may have impossible words only."""
    logits, uniforms = make_logits(5, 2 * TILE + 9, torch.bfloat16), torch.rand(5, dtype=torch.float64, device=DEVICE)
    logits[2, : TILE + 4] = -torch.inf
    together = draw_ids_triton(logits, uniforms)
    assert together.isfinite().all() and int(together[2, 0]) > TILE + 4
    for row in range(5):
        assert draw_ids_triton(logits[row : row + 1], uniforms[row : row + 1]).equal(together[row : row + 1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_spread(value: float) -> None:
    """A NaN or an infinity makes its row's log-probability NaN, and no other row's, as in plain torch."""
    logits, uniforms = make_logits(3, TILE + 9, torch.float32), torch.rand(3, dtype=torch.float64, device=DEVICE)
    logits[1, TILE + 3] = value
    for draw in (draw_ids_triton, draw_ids_eager):
        assert draw(logits, uniforms)[:, 1].isnan().tolist() == [False, True, False]
