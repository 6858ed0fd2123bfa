"""Contracts for features composed around stages, and for users of memory."""

import torch
from torch import nn

from drawloom.graph.testing import expect
from drawloom.ports import MEMORY_KINDS, MemoryUser, StageFeature


def memory_bytes_are_nonnegative_and_of_known_kinds(user: MemoryUser) -> None:
    """Kinds are among MEMORY_KINDS, bytes are nonnegative integers, and a second call returns the same."""
    sizes = user.device_bytes()
    for kind, size in sizes.items():
        expect(kind in MEMORY_KINDS, f"{kind!r} is none of {', '.join(MEMORY_KINDS)}")
        expect(isinstance(size, int) and size >= 0, f"{kind} are {size!r} bytes")
    expect(user.device_bytes() == sizes, "the same question has two answers")


def transformed_modules_stay_on_the_meta_device(feature: StageFeature) -> None:
    """A transformed module stays on the meta device, where all stages are built, and keeps all parameter names."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    before = {name for name, _ in module.named_parameters()}
    result = feature.transform(module)
    expect(isinstance(result, nn.Module), f"the feature returns a {type(result).__name__}, not an nn.Module")
    after = dict(result.named_parameters())
    expect(all(parameter.is_meta for parameter in after.values()), "a parameter is made real before its stage is")
    lost = sorted(before - after.keys())
    expect(not lost, f"the parameters {', '.join(lost)} are called otherwise, so that no checkpoint fits")


def transformed_modules_keep_output_shapes(feature: StageFeature) -> None:
    """A transformed module returns outputs with the same shape."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        output = feature.transform(module)(torch.empty(3, 8))
    expect(tuple(output.shape) == (3, 8), f"the transformed module gives {tuple(output.shape)} instead of (3, 8)")
