"""Whether Triton's kernels can run on a device; asked before any of them is imported."""

from importlib.util import find_spec

import torch

LEAST_CAPABILITY = (8, 0)
"""Ampere: older GPUs have no bfloat16."""


def why_no_triton(device: torch.device) -> str:
    """Why Triton can't run on a device, or nothing. Only on a CPU is triton imported: its interpreter may be on."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        return "" if _interprets() else "Triton runs on GPUs, and the device is the CPU"
    if device.type != "cuda":
        return f"Triton runs on GPUs of NVIDIA and AMD, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return ""


def _interprets() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
