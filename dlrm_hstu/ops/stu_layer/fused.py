"""One STU layer of kernels.

T tokens, D width, W = H * hidden. Traffic in [T, 512] bf16 passes: forward LN 1 + 1, UVQK 1 + 4, attention 3 + 1, gate 2 + 3, output
4 + 1; the backward makes y again inside the gate's backward, so that it is never saved.
"""

import torch
from torch import Tensor

from dlrm_hstu.ops.hstu_attention.kernels import attention_backward, attention_forward
from dlrm_hstu.ops.layer_norm.triton import layer_norm_backward, layer_norm_forward
from dlrm_hstu.ops.norm_gate_dropout.triton import norm_gate_dropout_backward, norm_gate_dropout_forward


def stu_layer_fused(x: Tensor, weights, settings, batch) -> Tensor:
    """See `dlrm_hstu.ops.stu_layer`."""
    tensors = [getattr(weights, name) for name in weights.__dataclass_fields__]
    return _STULayer.apply(x.contiguous(), settings, batch, *tensors)


class _STULayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, settings, batch, input_weight, input_bias, uvqk_weight, uvqk_bias, output_norm_weight, output_norm_bias, output):
        normed, mean, rstd = layer_norm_forward(x, input_weight, input_bias, settings.eps)
        uvqk = torch.addmm(uvqk_bias.to(x.dtype), normed, uvqk_weight.to(x.dtype))
        u, q, k, v = _parts(uvqk, settings)
        attention = attention_forward(q, k, v, batch.offsets, **_attention_keywords(settings, batch)).flatten(1)
        y, output_mean, output_rstd = norm_gate_dropout_forward(
            attention, u, output_norm_weight, output_norm_bias, eps=settings.eps, **_dropout_keywords(settings, batch)
        )
        out = torch.addmm(x, y, output.to(x.dtype))
        ctx.settings, ctx.batch = settings, batch
        keep = settings.recompute == "none"
        ctx.save_for_backward(
            x,
            mean,
            rstd,
            normed if keep else None,
            uvqk if keep else None,
            attention,
            output_mean,
            output_rstd,
            input_weight,
            input_bias,
            uvqk_weight,
            uvqk_bias,
            output_norm_weight,
            output_norm_bias,
            output,
        )
        return out

    @staticmethod
    def backward(ctx, dout):
        settings, batch, dout = ctx.settings, ctx.batch, dout.contiguous()
        x, mean, rstd, normed, uvqk, attention, output_mean, output_rstd = ctx.saved_tensors[:8]
        input_weight, input_bias, uvqk_weight, uvqk_bias, output_norm_weight, output_norm_bias, output = ctx.saved_tensors[8:]
        uvqk_weight = uvqk_weight.to(x.dtype)
        if uvqk is None:
            normed, _, _ = layer_norm_forward(x, input_weight, input_bias, settings.eps)
            uvqk = torch.addmm(uvqk_bias.to(x.dtype), normed, uvqk_weight)
        u, q, k, v = _parts(uvqk, settings)
        duvqk = torch.empty_like(uvqk)
        du, dq, dk, dv = _parts(duvqk, settings)

        dy = dout @ output.to(x.dtype).t()
        y = torch.empty_like(dy)
        dattention, _, doutput_norm_weight, doutput_norm_bias = norm_gate_dropout_backward(
            dy,
            attention,
            u,
            output_norm_weight,
            output_norm_bias,
            output_mean,
            output_rstd,
            du=du,
            y=y,
            **_dropout_keywords(settings, batch),
        )
        del dy
        doutput = _weight_gradient(y, dout)
        del y
        dattention = dattention.unflatten(1, (settings.num_heads, settings.hidden_dim))
        attention_backward(dattention, q, k, v, batch.offsets, dq=dq, dk=dk, dv=dv, **_attention_keywords(settings, batch))
        del dattention
        duvqk_weight = _weight_gradient(normed, duvqk)
        ones = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
        duvqk_bias = _weight_gradient(ones, duvqk).squeeze(0)  # as a matrix product 2.4 ms, as a sum 2.9, at 2.7 M rows
        dnormed = torch.mm(duvqk, uvqk_weight.t())
        dx, dinput_weight, dinput_bias = layer_norm_backward(dnormed, x, input_weight, mean, rstd, residual_gradient=dout)
        return (
            dx,
            None,
            None,
            dinput_weight,
            dinput_bias,
            duvqk_weight,
            duvqk_bias,
            doutput_norm_weight,
            doutput_norm_bias,
            doutput,
        )


def _parts(uvqk: Tensor, settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u [T, W] and q, k, v [T, H, d]: views."""
    u, v, q, k = uvqk.split(settings.split, dim=1)
    heads, attention_dim, hidden_dim = settings.num_heads, settings.attention_dim, settings.hidden_dim
    return u, q.unflatten(1, (heads, attention_dim)), k.unflatten(1, (heads, attention_dim)), v.unflatten(1, (heads, hidden_dim))


def _attention_keywords(settings, batch) -> dict:
    return {
        "max_seq_len": batch.scale_length,
        "alpha": settings.attention_dim**-0.5,
        "num_targets": batch.num_targets,
        "max_num_targets": batch.max_num_targets,
        "longest": batch.longest,
    }


def _dropout_keywords(settings, batch) -> dict:
    return {"p": settings.dropout, "key": None if batch.key is None else batch.key.mixed(), "rows": batch.rows}


def _weight_gradient(inputs: Tensor, outputs_gradient: Tensor) -> Tensor:
    """inputs^T outputs_gradient in fp32: sums over millions of rows keep their low bits."""
    if inputs.is_cuda and inputs.dtype != torch.float32:
        return torch.mm(inputs.t(), outputs_gradient, out_dtype=torch.float32)
    return inputs.t().float() @ outputs_gradient.float()
