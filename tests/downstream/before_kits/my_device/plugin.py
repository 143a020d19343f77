from ds_core.entries import AcceleratorEntry


def probe():
    import os

    return None if os.environ.get("MY_DEVICE") else "no device of ours is plugged in"


def ds_accelerators():
    return [AcceleratorEntry("mine", "cpu", "my_device.device:MyAccelerator", probe, priority=10)]
