"""`--recipe FILE`: values of options in a file, under those of the command line."""

import argparse
import tomllib
from pathlib import Path

import pytest

from hpctrain.arguments import Options, options

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return str(path)

    return write


def make_parser():
    made = options(recipe=True, prog="train.py")
    made.add_argument("--model", default="resnet50", choices=("resnet18", "resnet50"))
    made.add_argument("--sizes", type=int, nargs=2, default=[1, 2])
    made.add_argument("--secret", required=True)
    return made


RECIPE = """
about = "Of the paper."
global_batch = 256
timeout = 1
workers = "auto"
deterministic = true
resume = false
model = "resnet18"
sizes = [3, 4]
secret = "open"
"""


def test_recipe_overrides_defaults_and_not_the_command_line(write):
    recipe = write(RECIPE)
    parser = make_parser()
    parser.set_defaults(timeout=5.0, seed=7)
    read = parser.parse_args(["--global-batch", "64", "--recipe", recipe])
    assert (read.global_batch, read.timeout, read.workers) == (64, 1.0, "auto")
    assert (read.deterministic, read.resume, read.seed) == (True, False, 7)
    assert (read.model, read.sizes, read.secret) == ("resnet18", [3, 4], "open")
    assert read.recipe == recipe
    assert Options.of(read, {}).global_batch == 64


def test_recipe_leaves_the_argument_parser_as_it_was(write):
    parser = make_parser()
    read, rest = parser.parse_known_args([f"--recipe={write(RECIPE)}", "--other", "1"])
    assert (read.model, rest) == ("resnet18", ["--other", "1"])
    read = parser.parse_args(["--secret", "x"])
    assert (read.model, read.timeout, read.sizes) == ("resnet50", Options().timeout, [1, 2])
    assert not hasattr(read, "recipe")
    with pytest.raises(SystemExit):
        parser.parse_args([])


def test_help_shows_recipe_values(write, capsys):
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["--recipe", write(RECIPE + "clip_value = 3.5\n"), "--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert "--recipe FILE.toml" in output
    assert "(default: 1.0)" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("global_bach = 256", "global_bach is no option of train.py; did you mean global_batch?"),
        ("global-batch = 256", "global-batch is no option of train.py; did you mean global_batch?"),
        ("zzz = 1", "zzz is no option of train.py\n"),
        ("recipe = 'other.toml'", "recipe is no option"),
        ("[training]\ntimeout = 0.1", "training is no option"),
        ("timeout = {x = 1}", "timeout: {'x': 1} is not a number or text"),
        ("global_batch = 0", "global_batch: 0 is not a whole number from 1 on"),
        ("global_batch = 2.5", "global_batch: 2.5 is not a whole number from 1 on"),
        ("global_batch = true", "global_batch: True is not a number or text"),
        ("precision = 'bf61'", "precision: invalid choice: 'bf61' (choose from "),
        ("deterministic = 1", "deterministic: 1 is not true or false"),
        ("resume = 'no'", "resume: 'no' is not true or false"),
        ("timeout = [0.1]", "timeout: [0.1] is not a single value"),
        ("sizes = 3", "sizes: 3 is not a list"),
        ("sizes = [3]", "sizes: expected 2 arguments"),
        ("sizes = [3, 4, 5]", "sizes: [3, 4, 5] is too long"),
        ("timeout = ", "no TOML file: "),
        ("timeout = 1\ntimeout = 2", "no TOML file: "),
        ("timeout = " + "9" * 5000, "no TOML file: "),
        ("timeout = " + "[" * 5000, "no TOML file: "),
    ],
)
def test_wrong_recipe_is_one_error_with_its_name(write, capsys, text, message):
    path = write(text)
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["--secret", "x", "--recipe", path])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hpctrain: error: --recipe {path}: {message}")
    fix, more = (
        "  fix:      train.py --help (lists all options)",
        "  more:     hpctrain explain HT523",
    )
    assert error.splitlines()[1:] == [fix, more]


def test_recipe_for_a_script_that_lacks_its_options_names_the_fix(write, capsys):
    parser = options(prog="train.py")
    with pytest.raises(SystemExit):
        parser.parse_args(["--recipe", write("epochs = 3\nclip_norm = 1")])
    error = capsys.readouterr().err.splitlines()[0]
    assert error.endswith("of train.py; hpctrain.options(recipe=True) has clip_norm")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("flip = true", [], True),
        ("flip = true", ["--no-flip"], False),
        ("flip = false", [], False),
        ("flip = false", ["--flip"], True),
        ("", [], False),
    ],
)
def test_recipe_switch_and_its_negation(write, text, line, expected):
    parser = options(recipe=True, prog="train.py")
    parser.add_argument("--flip", action="store_true")
    parser.add_argument("--no-flip", dest="flip", action="store_false")
    assert parser.parse_args(["--recipe", write(text), *line]).flip is expected
    assert parser.parse_args([]).flip is False


def test_recipe_option_and_switch_of_one_name(write):
    parser = options(recipe=True, prog="train.py")
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--huge", dest="size", action="store_const", const=99)
    parser.add_argument("--blur", action=argparse.BooleanOptionalAction)
    read = parser.parse_args(["--recipe", write("size = 7\nblur = false")])
    assert (read.size, read.blur) == (7, False)
    assert parser.parse_args(["--recipe", write("size = 7"), "--huge"]).size == 99


def test_recipe_text_is_converted_once(write):
    parser = options(recipe=True, prog="train.py")
    parser.add_argument("--mark", type=lambda text: f"{text}!")
    assert parser.parse_args(["--recipe", write("mark = 'x'")]).mark == "x!"


@pytest.mark.parametrize(
    ("action", "more", "value"),
    [
        ("append", {}, "'x'"),
        ("append", {}, "['x']"),
        ("extend", {"nargs": "+"}, "['x']"),
        ("append_const", {"const": 1}, "true"),
        ("count", {}, "true"),
        ("store_const", {"const": 5}, "true"),
    ],
)
def test_recipe_refuses_options_without_a_value(write, capsys, action, more, value):
    parser = options(recipe=True, prog="train.py")
    parser.add_argument("-t", "--tag", action=action, **more)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--recipe", write(f"tag = {value}")])
    assert caught.value.code == 2
    assert "tag: -t/--tag is for the command line alone" in capsys.readouterr().err


def test_unreadable_recipe_is_one_error(tmp_path, capsys):
    (tmp_path / "latin.toml").write_bytes(b"about = '\xe9'")
    for name, message in (
        ("nothing.toml", "No such file"),
        (".", "Is a directory"),
        ("latin.toml", "no TOML file"),
    ):
        with pytest.raises(SystemExit) as caught:
            make_parser().parse_args(["--secret", "x", "--recipe", name])
        assert caught.value.code == 2
        assert f"--recipe {name}: {message}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--secret", "x", "--recipe"])
    assert "argument --recipe: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_of_the_repository_name_their_source(path):
    """Check the comments only; the tests of the examples run the recipes."""
    text = path.read_text()
    about = tomllib.loads(text)["about"]
    assert "https://" in about
    assert "published" in about.lower()
    assert "--" not in text
