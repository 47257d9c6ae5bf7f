"""Advice after `No module named …`: the right package, or none."""

import pytest

from hpctrain.launch.missing_module import advice

PYTHON = "/venv/bin/python3"
INSTALL = f"  or:       {PYTHON} -m pip install "


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("torch", f"{INSTALL}torch"),
        ("flash_attn", f"{INSTALL}flash_attn"),
        # The package with the name of the module is another one, or abandoned.
        ("sklearn", f"{INSTALL}scikit-learn"),
        ("cv2", f"{INSTALL}opencv-python-headless"),
        ("hydra", f"{INSTALL}hydra-core"),
        ("apex", "  fix:      from hpctrain.compat.apex import … (the same functions, on torch "
         "alone)"),
        ("horovod", f"  fix:      {PYTHON} -m hpctrain horovod build"),
        # A letter that is missing, added, another one, or swapped.
        ("tranformers", "  expected: did you mean transformers?"),
        ("panda", "  expected: did you mean pandas?"),
        ("numppy", "  expected: did you mean numpy?"),
        ("numpi", "  expected: did you mean numpy?"),
        ("nupmy", "  expected: did you mean numpy?"),
        ("Torch", "  expected: did you mean torch?"),
        ("pytset", "  expected: did you mean pytest?"),  # installed
        # The package is there, and has no such module.
        ("torch.no.such", "  expected: another version of torch, or no file torch.py before it on "
         "sys.path"),
        ("my_own_module", "  fix:      activate the environment with my_own_module before hpctrain "
         "run"),
        ("utl", "  fix:      activate the environment with utl before hpctrain run"),
    ],
)  # fmt: skip
def test_missing_module_is_advised_with_its_package_or_with_none(name, last):
    error = f"ModuleNotFoundError: No module named '{name}'"
    lines = advice(error, [PYTHON, "t.py"]).split("\n")
    assert lines[-1] == last
    assert any("pip install" in line for line in lines) == last.startswith(INSTALL)


def test_other_errors_and_other_programs():
    assert advice("ImportError: cannot import name 'x' from 'torch'", [PYTHON]) == ""
    error = "ModuleNotFoundError: No module named 'yaml'"
    assert advice(error, ["./start.sh"]).endswith("python -m pip install PyYAML")
