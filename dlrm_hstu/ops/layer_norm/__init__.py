"""Layer norm with fp32 statistics, and the gate z * sigmoid(LN(z))."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Affine layer norm over the last axis. x: [T, D]; weight, bias: fp32 [D]. Statistics in fp32, result in x's dtype."""
    return torch_layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def swish_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x * sigmoid(LN(x)) over the last axis: the gate is normalized, the value is not. x: [T, D]; weight, bias: fp32 [D]."""
    wide = x.float()
    return (wide * torch.sigmoid(torch_layer_norm(wide, weight.shape, weight, bias, eps))).to(x.dtype)
