from ds_core.entries import KernelEntry


def ds_kernels():
    return [KernelEntry("squared_norm", "mine", "my_norm.norm:squared_norm", 5, devices=("cpu",), dtypes=("float32",))]
