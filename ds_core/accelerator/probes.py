"""Probes of device types: None if usable, else the reason why not. They initialize no device."""

from __future__ import annotations

__all__ = ["cuda", "mps", "privateuse1", "xpu"]


def cuda() -> str | None:
    """Counts devices only, so that no context is created and forking stays safe."""
    import torch

    if not torch.backends.cuda.is_built():  # true of ROCm builds as well
        return "this torch is built without CUDA or ROCm"
    if torch.cuda.device_count() == 0:
        return "no CUDA device is visible: the driver is missing, or CUDA_VISIBLE_DEVICES hides all"
    return None


def xpu() -> str | None:
    """Intel GPUs."""
    import torch

    if not torch.xpu._is_compiled():
        return "this torch is built without XPU"
    if torch.xpu.device_count() == 0:
        return "no XPU device is visible: the driver is missing, or ZE_AFFINITY_MASK hides all"
    return None


def mps() -> str | None:
    """Apple GPUs."""
    import torch

    if not torch.backends.mps.is_built():
        return "this torch is built without MPS"
    return None if torch.backends.mps.is_available() else "this machine has no MPS device, or its macOS is too old"


def privateuse1() -> str | None:
    """A device that another package registered with torch."""
    import torch

    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    if module is None:
        return "no package has registered a PrivateUse1 device with torch"
    if hasattr(module, "is_available") and not module.is_available():
        return f"{name} is registered with torch but says that no device is available"
    return None
