"""The backend `dataparallel`, as far as a machine without GPUs shows it."""

import copy
import threading

import pytest
import ranks
import torch
from torch import nn

import hpctrain
from hpctrain.backends import BackendSettings, check
from hpctrain.backends.dataparallel import TransparentDataParallel
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError

ALONE = World(0, 1, 0, 1, 0, 1, ("here",), "none")
SETTINGS = BackendSettings(1.0, 1.0)


def test_dataparallel_accepts_one_process_with_a_gpu():
    check("dataparallel", ALONE, torch.device("cuda", 0), SETTINGS)


def test_dataparallel_refused_without_gpu():
    with pytest.raises(UsageError) as refused:
        check("dataparallel", ALONE, torch.device("cpu"), SETTINGS)
    assert "no GPU" in str(refused.value)
    assert refused.value.code == "HT301"
    assert refused.value.fixes == ("--backend single",)


def open_dataparallel():
    hpctrain.Session(backend="dataparallel", batch_size=2)


def test_dataparallel_refused_on_every_rank():
    results = ranks.run(3, open_dataparallel)
    for result in results:
        assert isinstance(result, UsageError)
    assert "in a world of 3 ranks" in str(results[0])
    assert "one process for all GPUs" in str(results[0])
    assert results[0].code == "HT301"
    assert results[0].fixes == ("--backend ddp", "start one process")


def test_dataparallel_model_keeps_names_and_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.note = "mine"
    plain, x = copy.deepcopy(model), torch.randn(5, 3)
    wrapped = TransparentDataParallel(model)
    assert isinstance(wrapped, nn.DataParallel)
    assert wrapped.note == "mine"
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    for names in ("named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(wrapped, names)()] == [n for n, _ in getattr(plain, names)()]
    wrapped(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(model[1].running_mean, plain[1].running_mean)
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    wrapped.load_state_dict(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict())
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = wrapped.nothing_of_this_name


def test_dataparallel_threads_inherit_autocast_dtype():
    """Stand in for the threads of DataParallel, one for each GPU, by a thread of the test."""
    seen = []
    module = nn.Linear(1, 1)
    module.register_forward_hook(lambda *_: seen.append(torch.get_autocast_dtype("cuda")))
    wrapped = TransparentDataParallel(module)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        wrapped(torch.ones(1, 1))
        thread = threading.Thread(target=module, args=(torch.ones(1, 1),))
        thread.start()
        thread.join()
    finally:
        torch.set_autocast_dtype("cuda", before)
    assert seen == [torch.bfloat16] * 2


def test_dataparallel_sequential_stays_iterable():
    layers = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    wrapped = TransparentDataParallel(layers)
    assert wrapped[0] is layers[0]
    assert list(wrapped) == list(layers)
    assert len(wrapped) == 2
    plain = TransparentDataParallel(nn.Linear(1, 2))
    assert plain
    with pytest.raises(TypeError):
        len(plain)
    with pytest.raises(TypeError):
        iter(plain)
