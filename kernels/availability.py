"""Whether Triton can run on a device."""

from importlib.util import find_spec

import torch

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability, that of Ampere: older GPUs have no bfloat16."""


def why_no_triton(device: torch.device) -> str:
    """Return the reason why Triton can't run on a device, as half a sentence; empty if it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        # Importing triton is slow, so only a CPU, where its interpreter must be on, pays for it.
        return "" if _is_interpreted() else "Triton runs on GPUs, and the device is the CPU"
    if device.type != "cuda":
        return f"Triton runs on GPUs of NVIDIA and AMD, and the device is {device.type}"
    if not torch.cuda.is_available():
        return ""  # a plan for a device that this machine does not have
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return ""


def _is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
