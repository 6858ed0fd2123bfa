"""Draws from logits in plain torch."""

import torch

from drawloom.kernels.sampling.eager import draw_ids_logps_and_entropies


def test_draws_follow_the_distribution() -> None:
    """Evenly spread numbers draw each id as often as its probability says, and never an impossible one."""
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    numbers = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    numbers[0], numbers[-1] = 0.0, 1 - 2.0**-53
    ids, logps, entropies = draw_ids_logps_and_entropies(probabilities.log().expand(1000, -1), numbers).unbind(1)
    assert torch.bincount(ids.long(), minlength=6).tolist() == [0, 500, 0, 300, 200, 0]
    torch.testing.assert_close(logps, probabilities.log()[ids.long()], rtol=1e-6, atol=1e-6)
    entropy = -(probabilities[probabilities > 0].log() * probabilities[probabilities > 0]).sum()
    torch.testing.assert_close(entropies, entropy.expand(1000), rtol=1e-6, atol=1e-6)
