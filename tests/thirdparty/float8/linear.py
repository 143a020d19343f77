import torch
from torch import nn
from torch.nn import functional as F

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(x):
    """x as e4m3 holds it, with one scale per row; its gradient is passed on unchanged."""
    scale = x.detach().abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    held = (x.detach() / scale).to(torch.float8_e4m3fn).float() * scale
    return x + (held.to(x.dtype) - x.detach())


class Float8Linear(nn.Linear):
    def forward(self, x):
        return F.linear(rounded(x), rounded(self.weight), self.bias)


def convert(model, skip):
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name not in skip:
            module.__class__ = Float8Linear
    return model
