"""The packages that a release has: sdist and wheel in an empty environment, conda, Apptainer."""

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import hpctrain
from hpctrain._version import OLDEST_TORCH

TOP = Path(__file__).resolve().parents[2]
IMPORTS = """
import importlib, sys
for name in ("hpctrain", *("hpctrain." + part for part in sys.argv[1:])):
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), module.__file__
    for public in module.__all__:
        getattr(module, public)
"""
# The packages whose names are for scripts; those of hpctrain itself are the first.
PARTS = ("compat.apex", "data", "jobs")


def run(*command, cwd, code=0):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def copy_source(folder):
    """Write what setup.py needs into a folder."""
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(TOP / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TOP / "hpctrain", folder / "hpctrain", ignore=ignored)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Return the folder with the sdist, and the wheel that was made of it."""
    folder = tmp_path_factory.mktemp("release")
    copy_source(folder)
    run(sys.executable, "-m", "build", cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def installed(release, tmp_path_factory):
    """Return an environment with the wheel, which finds torch and others of this interpreter."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run(*pip, *release.glob("*.whl"), cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return python


@pytest.mark.slow
@pytest.mark.e2e
def test_sdist_and_wheel_have_every_file_and_a_page_that_an_index_can_show(release):
    run(sys.executable, "-m", "twine", "check", "--strict", *release.iterdir(), cwd=release)
    kinds = (".py", ".gz", ".toml", ".txt", ".typed", ".html", ".css")
    files = {path.relative_to(TOP) for path in (TOP / "hpctrain").rglob("*") if path.is_file()}
    wanted = {str(path) for path in files if path.suffix in kinds}
    assert len(wanted) > 300
    with tarfile.open(*release.glob("*.tar.gz")) as sdist:
        assert wanted <= {name.partition("/")[2] for name in sdist.getnames()}
    (wheel,) = release.glob("*.whl")
    names = run(sys.executable, "-m", "zipfile", "-l", wheel, cwd=release)
    assert wanted <= {line.split()[0] for line in names.splitlines()}


@pytest.mark.slow
@pytest.mark.e2e
def test_wheel_in_an_empty_environment_has_its_command_and_all_public_names(installed, tmp_path):
    program = installed.with_name("hpctrain")
    assert "usage: hpctrain" in run(program, "--help", cwd=tmp_path)
    assert run(program, "hostlist", "n[1-2]", cwd=tmp_path) == "n1\nn2\n"
    run(installed, "-I", "-c", IMPORTS, *PARTS, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.e2e
def test_types_of_the_package_serve_a_project_with_strict_types(installed, tmp_path):
    shutil.copy(TOP / "tests/source/typed_project/train.py", tmp_path / "train.py")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed]
    run(*mypy, "--cache-dir", tmp_path / "cache", "train.py", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.e2e
def test_script_beside_a_clone_imports_the_package_and_not_the_folder_of_the_clone(tmp_path):
    clone = tmp_path / "hpctrain"
    clone.mkdir()
    copy_source(clone)
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run(*pip, "-e", clone, cwd=tmp_path)
    (tmp_path / "train.py").write_text("import hpctrain; print(hpctrain.__file__)")
    assert run(python, "train.py", cwd=tmp_path) == f"{clone / 'hpctrain' / '__init__.py'}\n"


def test_conda_recipe_says_what_setup_cfg_says():
    recipe = yaml.safe_load((TOP / "containers/conda/recipe.yaml").read_text())
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(TOP / "setup.cfg")
    options = setup["options"]
    needed = [line for line in options["install_requires"].splitlines() if line]
    assert f"torch >={OLDEST_TORCH}.0a0" in needed
    needed = [line.replace("torch ", "pytorch ") for line in needed]
    needed.append(f"python {options['python_requires']}")
    assert sorted(recipe["requirements"]["run"]) == sorted(needed)
    scripts = setup["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["context"]["version"] == hpctrain.__version__
    about = recipe["about"]
    assert (about["license"], about["summary"]) == (
        setup["metadata"]["license"],
        setup["metadata"]["description"],
    )
    assert (TOP / "containers/conda" / recipe["source"]["path"] / about["license_file"]).is_file()


def test_apptainer_definition_has_a_value_for_each_name_and_scripts_that_bash_reads():
    text = (TOP / "containers" / "hpctrain.def").read_text()
    _, *rest = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    assert set(sections) >= {"arguments", "files", "post", "environment", "test"}
    values = dict(line.strip().split("=", 1) for line in sections["arguments"].split("\n") if line)
    names = set(re.findall(r"\{\{ (\w+) \}\}", text))
    assert names == set(values)
    readme = (TOP / "containers" / "README.md").read_text()
    assert not {name for name in names if f"`{name}`" not in readme}
    for name in ("post", "environment", "test"):
        script = re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], sections[name])
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
