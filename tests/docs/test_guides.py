"""The code blocks of all pages: each command line is accepted, and jobs and Python are valid."""

import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import re
import runpy

import launches
import pages
import pytest
import readme

import hpctrain
from hpctrain.cli import COMMANDS, parser_of
from hpctrain.jobs import JobSpec, job_files, script

EXAMPLE = re.compile(r"examples/\w+\.py")
# Scripts of the reader, which have the options of hpctrain.
SCRIPTS = ("train.py", "ported.py")
# Complaints of a parser about what a command in a sentence leaves out.
LEFT_OUT = re.compile(r"are required|expected (one|at least one) argument|'[A-Z.]+'")
# Options of other programs and of sources in this repository that the pages name.
FOREIGN = {
    "sbatch and srun": {
        *("--no-kill", "--open-mode", "--gpus-per-task", "--gpu-bind", "--export", "--mem-per-cpu"),
        "--kill-on-bad-exit",
    },
    "torchrun": {"--nnodes", "--rdzv-endpoint", "--master-port", "--use-env"},
    "horovodrun": {"--min-np", "--max-np", "--host-discovery-script", "--disable-cache"},
    "flux": {"--nslots", "--cores-per-slot", "--gpus-per-slot", "--queue", "--bank"},
    "flux batch": {"--time-limit"},
    "accelerate": {"--use_cpu", "--main_process_port"},
    "apptainer": {"--nv", "--cleanenv"},
    "pip": {"--no-deps"},
    "timm": {"--model-ema", "--layer-decay", "--initial-checkpoint"},
}
OWN = (
    "examples/imagenet.py",
    "tests/support/survivor.py",
    "tests/run.sh",
    "tests/planted/__main__.py",
)


class Parser(Exception):
    """The parser of a script, in the place of what it would return."""


@functools.cache
def parser_of_program(name):
    """Return the parser of a command, of a script of the reader, or of an example.

    An example is run up to its command line.
    """
    if name in SCRIPTS:
        parser = hpctrain.options()
        for own in ("--lr", "--clip-norm"):
            parser.add_argument(own, type=float)
        return parser
    if not EXAMPLE.fullmatch(name):
        return parser_of([name])

    def stop(parser, *_):
        raise Parser(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.syspath_prepend(launches.TOP / "examples")
        with pytest.raises(Parser) as caught:
            runpy.run_path(str(launches.TOP / name), run_name="__main__")
    return caught.value.args[0]


def calls(command):
    """Yield the name and the arguments of each command, script and example in a line."""
    for words in pages.simple_commands(command):
        if words[0] not in readme.PROGRAMS:
            continue
        for number, word in enumerate(words):
            last = [word for word in words[number + 1 :] if word not in ("…", "$@")]
            if word == "hpctrain" and last and (last[0] in COMMANDS or number == 0):
                yield last[0], last
            elif word in SCRIPTS or EXAMPLE.fullmatch(word):
                yield word, last
            elif re.fullmatch(r"sbatch/\w+\.(sh|toml)", word):
                if word.endswith(".toml"):
                    last = last[last.index("--") + 1 :] if "--" in last else []
                for example in set(EXAMPLE.findall((launches.TOP / word).read_text())):
                    yield example, last


def complaint(name, words, capsys):
    """Return what the parser of a program says of these arguments."""
    try:
        parser_of_program(name).parse_args(words)
    except SystemExit as ended:
        return capsys.readouterr().err.splitlines()[-1] if ended.code else ""
    return ""


@pytest.mark.parametrize("programs", ["hpctrain", pytest.param("examples", marks=pytest.mark.slow)])
def test_command_lines_of_all_pages_are_accepted(programs, capsys, monkeypatch):
    monkeypatch.chdir(launches.TOP)  # recipes are read
    wrong, seen = [], 0
    for page in pages.PAGES:
        blocks = pages.commands_of(page)
        for command in (*blocks, *pages.commands_in_sentences(page)):
            for name, words in calls(command):
                if name.startswith("examples") != (programs == "examples"):
                    continue
                seen += 1
                said = complaint(name, words, capsys)
                if said and (command in blocks or not LEFT_OUT.search(said)):
                    wrong.append(f"{page}: {command}\n    {said}")
    assert not wrong, "\n".join(wrong)
    assert seen > 20


@functools.cache
def known_options():
    """Return the options of the command line and of scripts, and those named in sources."""
    parsers = [parser_of(COMMANDS), hpctrain.options()]
    known = set().union(*FOREIGN.values())
    for parser in parsers:  # grows
        for action in parser._actions:
            known.update(action.option_strings)
            if isinstance(action.choices, dict):
                parsers += action.choices.values()
    for name in OWN:
        words = re.findall(r'(?:--|")([a-z][\w-]+)', (launches.TOP / name).read_text())
        known.update(f"--{word}" for word in words)
    return known


def test_options_that_pages_name_exist():
    named = re.compile(r"--[a-z][\w-]*\w(?![\w-]*…)")
    wrong = [
        f"{page}: {match[0]}"
        for page in pages.PAGES
        for span in pages.spans(page)
        if (match := named.match(span)) and match[0] not in known_options()
    ]
    assert not wrong, "\n".join(wrong)


def jobs_of_pages():
    """Return page and text of each block of TOML, without those of a pyproject.toml."""
    return [
        pytest.param(block.text, id=f"{page}-{number}")
        for page in pages.PAGES
        for number, block in enumerate(pages.blocks(page, "toml"))
        if not block.text.startswith("[project.")
    ]


@pytest.mark.parametrize("text", jobs_of_pages())
def test_toml_of_a_page_is_a_job(text, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(text)
    values = job_files.merged({"command": "python train.py"}, job_files.read(path))
    assert "#SBATCH" in script.render(JobSpec(**values))


# What these names are in the blocks and sentences of all pages.
NAMES = {
    "data": "hpctrain.data",
    "hpctrain": "hpctrain",
    "job": "hpctrain.jobs.Job",
    "run": "hpctrain.Run",
    "session": "hpctrain.Session",
}
NO_NAMES = {
    "hpctrain.trackers": "a group of entry points",
    "job.py": "a file",
    "run.json": "a file",
}


def resolve(path):
    """Return the object of a dotted path, or `None` for an attribute that only instances have.

    Raises:
        AttributeError: there is no such name.
    """
    found = hpctrain
    for name in path.split(".")[1:]:
        if inspect.isclass(found):
            _, _, attributes = (inspect.getdoc(found) or "").partition("Attributes:")
            if re.search(rf"^ +{name}: ", attributes, re.MULTILINE):
                return None
        if inspect.ismodule(found) and not hasattr(found, name):
            if importlib.util.find_spec(f"{found.__name__}.{name}") is None:
                raise AttributeError(f"{found.__name__} has no {name}")
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found


def problems(code, whole):
    """Yield what names of hpctrain do not exist in a code, and arguments that they do not take.

    Args:
        code: statements or an expression.
        whole: whether calls have all of their arguments.
    """
    tree, names = ast.parse(code), dict(NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "hpctrain":
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in ast.walk(tree):
        place = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        first, _, last = place.partition(".")
        if first not in names or not re.fullmatch(r"[\w.]+", place) or place in NO_NAMES:
            continue
        try:
            found = resolve(".".join(filter(None, (names[first], last))))
            if isinstance(node, ast.Call) and callable(found):
                bound(node, found, whole)
        except (AttributeError, TypeError) as error:
            yield f"{place}: {error}"


def bound(call, function, whole):
    """Check the arguments of a call; those that a page leaves open are not known.

    Raises:
        TypeError: the function does not take them.
    """
    keywords = {keyword.arg: None for keyword in call.keywords}
    if None in keywords or any(ast.unparse(one).startswith(("*", "...")) for one in call.args):
        return
    signature = inspect.signature(function)
    own = [None] if "self" in signature.parameters else []
    (signature.bind if whole else signature.bind_partial)(*own, *call.args, **keywords)


def test_python_of_all_pages_has_names_and_arguments_that_exist():
    wrong = []
    for page in pages.PAGES:
        for block in pages.blocks(page, "python"):
            code = re.sub("^( *)…$", r"\1...", block.text, flags=re.MULTILINE)
            compile(code, page, "exec")
            wrong += [f"{page}: {problem}" for problem in problems(code, whole=True)]
        for span in pages.spans(page):
            with contextlib.suppress(SyntaxError):  # no Python
                found = problems(span.replace("…", "..."), whole=False)
                wrong += [f"{page}: {problem}" for problem in found]
    assert not wrong, "\n".join(wrong)
