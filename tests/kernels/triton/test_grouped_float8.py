def test_a_rank_without_rows_has_zero_gradients() -> None:
    """Experts without any row return no rows, and zero weight gradients."""
    rows, probabilities = torch.zeros(0, 32, device=DEVICE).bfloat16(), torch.zeros(0, device=DEVICE)
    weights = [spread(*shape).requires_grad_() for shape in ((3, 96, 32), (3, 32, 48))]
    ends = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for kernels in (TRITON, EAGER):
        y = expert_rows_float8(kernels, rows, probabilities, weights[0], weights[1], ends)
        assert y.shape == (0, 32)
        assert not any(gradient.any() for gradient in torch.autograd.grad(y.sum(), weights))
