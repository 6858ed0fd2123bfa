"""Hyper-connections against their papers' formulas in float64, and at their initial values against plain residuals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.branch_specs import ConnectionSpec
from drawloom.components.model.pattern import Pattern
from drawloom.components.ports.model import LayerRange
from support.families import (
    CLOSE,
    assert_generated_as_whole_texts,
    assert_operations_equal_the_count_of_torch,
    gradients,
    small,
)
from support.qwen3 import cpu_kernels, logits_of, one_document

WIDTH, EPS = 6, 1e-5
SIZES: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
}


def connect(spec: ConnectionSpec) -> Any:
    """Return a connection in float64."""
    architecture: Any = type("Sizes", (), {"hidden_size": WIDTH, "rms_norm_eps": EPS})
    return spec.build(architecture, cpu_kernels()).double()


def apply_branch(connection: Any, streams: Tensor, branch: Any) -> Tensor:
    """Return streams (tokens, streams, width) after a branch."""
    streams, inputs, weights = connection(streams, None, None)
    connected: Tensor = connection.kernels.connect_streams(streams, branch(inputs), weights, None)[0]
    return connected


def apply_matrix(connection: Any, streams: Tensor, branch: Any) -> Tensor:
    """Return streams after a branch by equations 2 to 4, 10 to 13 and 14 of arXiv 2409.19606, token by token."""
    count, rows = streams.shape[1], []
    alpha, beta = connection.scale
    for token in streams:
        normed = F.rms_norm(token, (WIDTH,), connection.norm.weight, EPS)
        dynamic = torch.tanh(normed @ connection.projection.T)
        start = torch.zeros(count + 1, count + 1, dtype=token.dtype)
        start[0, 1:], start[1:, 1:], start[1 + connection.spec.first, 0] = 1.0, torch.eye(count, dtype=token.dtype), 1.0
        static = torch.cat(
            [F.pad(connection.write[None], (1, 0)), torch.cat([connection.read[:, None], connection.mix], 1)]
        )
        learned = torch.cat([alpha * dynamic[:, :1], alpha * dynamic[:, 2:]], 1)
        matrix = start + static + torch.cat([F.pad(beta * dynamic[None, :, 1], (1, 0)), learned])
        to_streams, read, mix = matrix[0, 1:], matrix[1:, 0], matrix[1:, 1:]
        rows.append(torch.outer(to_streams, branch(read @ token)) + mix.T @ token)
    return torch.stack(rows)


def apply_manifold(connection: Any, streams: Tensor, branch: Any) -> Tensor:
    """Return streams after a branch by equations 7 to 9 of arXiv 2512.24880, token by token."""
    count, rows = streams.shape[1], []
    target = torch.full((count,), 0.2 / count, dtype=streams.dtype)
    target[connection.spec.first] += 0.8
    for token in streams:
        flat = F.rms_norm(token.flatten(), (count * WIDTH,), connection.norm.weight, EPS)
        parts = connection.projection @ flat
        scales = connection.scale
        read = torch.sigmoid((target / (1 - target)).log() + connection.read + scales[0] * parts[:count])
        write = 2 * torch.sigmoid(connection.write + scales[1] * parts[count : 2 * count])
        mix = (
            8 * torch.eye(count, dtype=token.dtype) + connection.mix + scales[2] * parts[2 * count :].view(count, count)
        )
        mix = mix.exp()
        for _ in range(20):
            mix = mix / mix.sum(0, keepdim=True)
            mix = mix / mix.sum(1, keepdim=True)
        rows.append(torch.outer(write, branch(read @ token)) + mix @ token)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("spec", "formula"),
    [
        (ConnectionSpec(streams=3, first=1), apply_matrix),
        (ConnectionSpec(streams=3, first=1, is_constrained=True), apply_manifold),
    ],
    ids=["hyper", "constrained"],
)
def test_streams_and_gradients_equal_the_formula(spec: ConnectionSpec, formula: Any) -> None:
    """With random parameters, streams and every gradient equal the paper's formula."""
    torch.manual_seed(0)
    connection, branch = connect(spec), nn.Linear(WIDTH, WIDTH).double()
    for parameter in connection.parameters():
        nn.init.normal_(parameter)
    streams = torch.randn(5, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    ours, theirs = (apply(connection, streams, branch) for apply in (apply_branch, formula))
    torch.testing.assert_close(ours, theirs)
    leaves = {"streams": streams, **dict(connection.named_parameters())}
    for name, ours_grad, grad in zip(
        leaves, *(gradients((part * factors).sum(), leaves) for part in (ours, theirs)), strict=True
    ):
        assert bool(grad.any()), name
        torch.testing.assert_close(ours_grad, grad, msg=name)


def test_one_stream_is_a_plain_residual() -> None:
    """With one stream and initial weights, the branch's output is added to its input."""
    x, branch = torch.randn(5, 1, WIDTH, dtype=torch.float64), nn.Linear(WIDTH, WIDTH).double()
    torch.testing.assert_close(apply_branch(connect(ConnectionSpec(streams=1, first=0)), x, branch), x + branch(x))


@pytest.mark.parametrize("residual", ["hyper", "constrained"])
def test_initial_models_equal_plain_ones(residual: str) -> None:
    """With initial values, logits and the plain model's gradients are those of plain residuals; streams then differ."""
    tokens, logits, grads = torch.randint(29, (2, 9)), [], []
    for kind in ("plain", residual):
        model = small(Pattern, layers="gdn, attention", num_hidden_layers=4, residual=kind, **SIZES)
        module = model.build(LayerRange(0, 4, embedding=True, head=True))
        for name, parameter in module.named_parameters():
            model.initialize_parameter(name, parameter.data, 3)
        logits.append(logits_of(module, tokens, one_document(2, 9)))
        parameters = dict(module.named_parameters())
        grads.append(dict(zip(parameters, gradients(logits[-1].logsumexp(-1).sum(), parameters), strict=True)))
    torch.testing.assert_close(logits[1], logits[0], **CLOSE)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-4, rtol=1e-3, msg=name)
    assert bool(grads[1]["model.layers.2.mlp_connection.read"].any())


@pytest.mark.parametrize("residual", ["hyper", "constrained"])
def test_generation_and_operations(residual: str) -> None:
    """A text token by token has the whole text's logits, and FLOPs are torch's count."""
    model = small(Pattern, layers="attention", residual=residual)
    assert_generated_as_whole_texts(model)
    assert_operations_equal_the_count_of_torch(model)
