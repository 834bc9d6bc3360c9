"""The two-layer perceptrons around the transducer."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dlrm_hstu.ops import layer_norm, swish_layer_norm

EPS = 1e-5


class Linear(nn.Linear):
    """nn.Linear that computes in its input's dtype. Weights are left to `dlrm_hstu.initialize`; biases start at 0."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.Module):
    """Affine layer norm of `width`; fp32 statistics."""

    def __init__(self, width: int, eps: float = EPS):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class SwishLayerNorm(LayerNorm):
    """x * sigmoid(LN(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return swish_layer_norm(x, self.weight, self.bias, self.eps)


class TokenMLP(nn.Module):
    """LN(W2 SLN(W1 x + b1) + b2): [rows, inputs] -> [rows, outputs]."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.inner = Linear(inputs, hidden)
        self.gate = SwishLayerNorm(hidden)
        self.outer = Linear(hidden, outputs)
        self.norm = LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.outer(self.gate(self.inner(x))))
