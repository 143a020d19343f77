import torch


def squared_norm(tensors):
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        total += wide.double().square().sum().cpu()
    return total
