from ds_core.accelerator.cpu import CpuAccelerator


class MyAccelerator(CpuAccelerator):
    name = "mine"
