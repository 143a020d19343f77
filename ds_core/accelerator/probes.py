"""Whether a device kind can be used here, without initialising it; each answers None or the reason why not."""

from __future__ import annotations

__all__ = ["cuda", "mps", "privateuse1", "xpu"]


def cuda() -> str | None:
    """Asks the driver through NVML where torch can, so that no context is made and forking stays safe."""
    import torch

    if not torch.backends.cuda.is_built() and torch.version.hip is None:
        return "this torch is built without CUDA"
    return (
        None
        if torch.cuda.device_count() > 0
        else "no CUDA device is visible (driver missing, or CUDA_VISIBLE_DEVICES hides all)"
    )


def xpu() -> str | None:
    """Intel GPUs."""
    import torch

    if not hasattr(torch, "xpu") or not torch.xpu._is_compiled():
        return "this torch is built without XPU"
    return None if torch.xpu.device_count() > 0 else "no XPU device is visible"


def mps() -> str | None:
    """Apple GPUs."""
    import torch

    if not torch.backends.mps.is_built():
        return "this torch is built without MPS"
    return None if torch.backends.mps.is_available() else "this macOS or machine has no MPS device"


def privateuse1() -> str | None:
    """A device that another package registered with torch."""
    import torch

    name = torch._C._get_privateuse1_backend_name()
    module = getattr(torch, name, None)
    if name == "privateuseone" or module is None:
        return "no package has registered a PrivateUse1 device with torch"
    available = getattr(module, "is_available", None)
    return (
        None
        if available is None or available()
        else f"{name} is registered with torch but says that no device is available"
    )
