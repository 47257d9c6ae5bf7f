"""The calls that `spawn` and `submit` send to ranks."""

import pickle
from types import SimpleNamespace

import torch

from hpctrain.process import calls


def test_call_may_use_a_name_that_is_a_special_module_of_torch():
    names = {"torch": torch, "__name__": "__main__"}
    # As in a notebook. cloudpickle sends torch.classes too, as it finds both words.
    exec("def count(data):\n    return torch.zeros(data.classes).numel()", names)
    sent = calls.pack(names["count"], [SimpleNamespace(classes=3)], {}, "HT814")
    function, arguments, _ = pickle.loads(sent)
    assert function(*arguments) == 3
