"""Messages of weights in float8."""

import torch

from drawloom.kernels.float8.eager import EAGER
from drawloom.kernels.float8.experts import pack_weights, unpack_weights
from support.kernels import DEVICE


def test_messages_bring_quantized_weights_and_take_half_the_bytes() -> None:
    """
    Every rank's rows arrive as their rounded numbers, other weights bit by bit, and rounding them again changes
    nothing; non-finite numbers stay visible.
    """
    shapes, widths = ((3, 48), (5,), (7, 16), (1, 80)), (48, 0, 16, 0)
    ranks = []
    for _ in range(2):
        weights = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
        weights[0] *= torch.exp2(torch.randint(-40, 40, (3, 1), device=DEVICE))
        weights[2][0] = 0
        ranks.append(weights)
    ranks[1][2][4, 3] = torch.nan
    messages = torch.stack([pack_weights([weight.view(-1) for weight in weights], widths) for weights in ranks])
    assert messages.dtype == torch.uint8 and messages.shape[1] <= 3 * 49 + 7 * 17 + 2 * 85 + 15
    outputs = [torch.full((2, weight.numel()), 3.0, dtype=torch.bfloat16, device=DEVICE) for weight in ranks[0]]
    unpack_weights(messages, outputs, widths)
    for rank, weights in enumerate(ranks):
        for weight, output, width in zip(weights, outputs, widths, strict=True):
            received = output[rank].view(weight.shape)
            if not width:
                assert torch.equal(received, weight)
                continue
            rounded = EAGER.quantize_rows(weight, False)
            expected = rounded.data.float() * rounded.scale[:, None]
            is_finite = expected.isfinite().all(1)
            assert torch.equal(received.float()[is_finite], expected[is_finite])
            assert not received[~is_finite].isfinite().any()
            again = EAGER.quantize_rows(received, False)
            assert torch.equal((again.data.float() * again.scale[:, None])[is_finite], expected[is_finite])
