"""The operations of the model, one folder each: the fp32 reference that specifies it, its kernels, and one public function."""

from dlrm_hstu.ops.counter_dropout import DropoutKey, dropout
from dlrm_hstu.ops.hstu_attention import hstu_attention
from dlrm_hstu.ops.layer_norm import layer_norm, swish_layer_norm
from dlrm_hstu.ops.norm_gate_dropout import norm_gate_dropout
from dlrm_hstu.ops.position_time import add_position_time

__all__ = ["DropoutKey", "add_position_time", "dropout", "hstu_attention", "layer_norm", "norm_gate_dropout", "swish_layer_norm"]
