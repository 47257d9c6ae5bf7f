"""Models on the meta device get their memory, and keep what modules share."""

import torch
from torch import nn

from hpctrain.backends.meta_models import allocate, on_meta


class Layer(nn.Module):
    def __init__(self, angles):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("count", torch.zeros(1))


def test_shared_tensors_stay_shared_and_buffers_keep_their_values():
    angles = torch.arange(4.0)
    with torch.device("meta"):
        model = nn.Sequential(Layer(angles), Layer(angles))
        model[1].linear.weight = model[0].linear.weight
    assert "0.linear.weight" in on_meta(model)
    assert "0.angles" not in on_meta(model)
    allocate(model, "cpu")
    assert not on_meta(model)
    assert model[0].linear.weight is model[1].linear.weight
    assert model[0].linear.weight.requires_grad
    assert model[0].angles is model[1].angles
    assert model[1].angles.tolist() == [0, 1, 2, 3]
    assert model[0].count is not model[1].count
    assert len(model.state_dict()) == 6
