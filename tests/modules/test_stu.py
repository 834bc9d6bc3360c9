"""One STU layer against its formula in fp64, and its dropout sites in the stack."""

import pytest
import torch
from torch.nn.functional import layer_norm, silu

from dlrm_hstu.model import DlrmHSTU
from dlrm_hstu.modules.layout import sequence_layout
from tests.batches import random_batch, relative_error, small_config


def by_formula(layer, x, lengths, num_targets, scale_length):
    """out = x + [u, a, LN(a) * u] W, sample by sample. Heads are 2 of width 16, 16 and value width 8."""
    n = layer_norm(x, (32,), layer.input_norm.weight, layer.input_norm.bias, 1e-6)
    u, v, q, k = (n @ layer.uvqk_weight + layer.uvqk_bias).split([16, 16, 32, 32], dim=1)
    u, attention, start = silu(u), torch.zeros_like(v), 0
    for length, targets in zip(lengths, num_targets, strict=True):
        rows = slice(start, start + length)
        mask = torch.ones(length, length, dtype=x.dtype).tril()
        mask[length - targets :, length - targets :] = torch.eye(targets)
        for h in range(2):
            scores = q[rows, h * 16 : h * 16 + 16] @ k[rows, h * 16 : h * 16 + 16].T / 4
            attention[rows, h * 8 : h * 8 + 8] = silu(scores) / scale_length * mask @ v[rows, h * 8 : h * 8 + 8]
        start += length
    gated = layer_norm(attention, (16,), layer.output_norm.weight, layer.output_norm.bias, 1e-6) * u
    return x + torch.cat([u, attention, gated], dim=1) @ layer.output_weight


def test_equals_the_formula():
    config = small_config(hidden_dim=8)
    layer = DlrmHSTU(config).transducer.layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    batch = random_batch(config, [3, 0, 12], num_candidates=[1, 2, 3])
    layout = sequence_layout(batch, 8)
    x = 2 * torch.randn(len(layout.position), 32, generator=torch.Generator().manual_seed(1))
    out = layer(x, layout, 40, None, (layout.sample, layout.position))
    expected = by_formula(layer.double(), x.double(), [12, 10, 23], [1, 2, 3], 40)
    assert relative_error(out.detach(), expected.detach()) < 2e-6


@pytest.mark.parametrize("site", ["input_dropout", "layer_dropout"])
def test_dropout_is_on_in_training_only_and_moves_with_step_and_seed(site):
    config = small_config(**{site: 0.4})
    model, other, plain = DlrmHSTU(config, seed=1), DlrmHSTU(config, seed=2), DlrmHSTU(small_config())
    for copy in (other, plain):
        copy.load_state_dict(model.state_dict())
    batch = random_batch(config, [5, 9, 2])

    def logits(m, step, training=True):
        return m.train(training)(batch, step).logits.detach()

    assert torch.equal(logits(model, 3), logits(model, 3))
    assert not torch.allclose(logits(model, 3), logits(model, 4), rtol=1e-3)
    assert not torch.allclose(logits(model, 3), logits(other, 3), rtol=1e-3)
    assert torch.equal(logits(model, 3, training=False), logits(plain, 0))


def test_every_dropout_of_the_stack_has_a_site_of_its_own(monkeypatch):
    """Equal sites would give two layers the same mask."""
    keys = []
    model = DlrmHSTU(small_config(num_layers=3, layer_dropout=0.5), seed=9)
    for layer in model.transducer.layers:
        layer.register_forward_pre_hook(lambda module, inputs: keys.append(inputs[3]))
    monkeypatch.setattr("dlrm_hstu.modules.transducer.dropout", lambda x, p, key, rows: (keys.append(key), x)[1])
    model(random_batch(model.config, [3, 4]), step=7)
    assert [(key.seed, key.step) for key in keys] == [(9, 7)] * 4
    assert len({key.site for key in keys}) == 4
