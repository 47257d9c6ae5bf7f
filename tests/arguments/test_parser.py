"""A Session reads the options that `hpctrain.options()` has added, and no others."""

import argparse
import copy
import dataclasses
import pickle
import re

import pytest

import hpctrain
from hpctrain.arguments import Options, foreign_names, names_of, options
from hpctrain.errors import UsageError


def like_nanogpt():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--compile", type=bool, default=True)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=40)
    return parser.parse_args(["--backend", "nccl"])


def like_detr():
    parser = argparse.ArgumentParser("DETR", add_help=False)
    parser.add_argument("--batch_size", default=2, type=int)
    parser.add_argument("--epochs", default=300, type=int)
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--resume", default="", help="resume from checkpoint")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(["--resume", ""])


def like_timm():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("Optimizer parameters")
    group.add_argument("--clip-grad", type=float, default=None)
    group.add_argument("--epochs", type=int, default=300)
    group.add_argument("--seed", type=int, default=None)
    group.add_argument("--workers", type=int, default=4)
    group.add_argument("--channels-last", action="store_true", default=True)
    return parser.parse_args([])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (like_nanogpt, "backend, batch_size, compile"),
        (like_detr, "batch_size, device, epochs, resume, seed"),
        (like_timm, "channels_last, epochs, seed, workers"),
    ],
)
def test_command_line_of_another_parser_sets_nothing_and_one_line_says_so(make, names, capsys):
    args = make()
    before = dict(vars(args))
    with hpctrain.Session(args) as opened:
        assert opened.options == Options()
        assert opened._context.own_options == before
    assert vars(args) == before
    lines = [line for line in capsys.readouterr().err.splitlines() if "has not parsed" in line]
    assert len(lines) == 1
    assert f"no option of hpctrain: {names} (to set them" in lines[0]


def test_foreign_names_that_a_keyword_sets_are_not_listed(capsys):
    args = argparse.Namespace(epochs=3, seed=7)
    with hpctrain.Session(args, epochs=args.epochs, seed=args.seed) as opened:
        assert (opened.options.epochs, opened.options.seed) == (3, 7)
    assert "has not parsed" not in capsys.readouterr().err


def test_foreign_command_line_without_names_of_options_is_no_line(capsys):
    with hpctrain.Session(argparse.Namespace(width=8)):
        pass
    assert "has not parsed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copy_of_the_command_line_keeps_the_mark_which_vars_does_not_show(copied):
    parser = options()
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args(["--epochs", "3"])
    assert copied(args) == args
    assert Options.of(copied(args), {}) == Options(epochs=3)
    assert "width" not in names_of(copied(args))
    assert set(vars(args)) == {*names_of(args), "width"}
    assert repr(args).startswith("Namespace(")


def test_new_namespace_of_its_values_is_the_scripts():
    args = options().parse_args(["--epochs", "3"])
    rebuilt = argparse.Namespace(**vars(args))
    assert Options.of(rebuilt, {}) == Options()
    assert "epochs" in foreign_names(rebuilt)
    assert foreign_names(args) == []


def test_values_that_the_script_changes_before_the_session_count():
    parser = options()
    parser.set_defaults(epochs=9, ddp="static-graph")
    args = parser.parse_args([])
    assert Options.of(args, {}) == Options(epochs=9, ddp="static-graph")
    args.epochs, args.max_steps = 5, 7
    del args.ddp
    args.clip_norm = 1.0  # no option of the command line
    assert Options.of(args, {}) == Options(epochs=5, max_steps=7)


def test_default_of_a_keyword_that_is_no_option_is_rejected(capsys):
    parser = options()
    parser.set_defaults(clip_norm=1.0)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([])
    assert caught.value.code == 2
    assert "fix:      hpctrain.Session(args, clip_norm=1.0)" in capsys.readouterr().err
    parser.add_argument("--clip-norm", type=float)  # now it is the script's
    args = parser.parse_args([])
    assert args.clip_norm == 1.0
    assert Options.of(args, {}) == Options()


def test_namespace_of_the_caller_gets_the_values_and_the_returned_one_is_marked():
    given = argparse.Namespace(width=3)
    args = options().parse_args(["--epochs", "3"], namespace=given)
    assert (given.epochs, args.width) == (3, 3)
    args.epochs = 4
    assert given.epochs == 4
    assert Options.of(args, {}) == Options(epochs=4)
    known, rest = options().parse_known_args(["--epochs", "3", "--width", "2"])
    assert Options.of(known, {}) == Options(epochs=3)
    assert rest == ["--width", "2"]


def test_positional_arguments_between_options_are_parsed_too():
    parser = options()
    parser.add_argument("files", nargs="*")
    args = parser.parse_intermixed_args(["a", "--epochs", "3", "b"])
    assert args.files == ["a", "b"]
    assert Options.of(args, {}) == Options(epochs=3)


@pytest.mark.parametrize(
    "own",
    [
        ["--clip-norm", "--lr", "--seed-everything", "--same-data", "--handle-signals"],
        ["--ema", "--decay", "--data", "--init-from", "--lr-schedule"],
    ],
)
def test_argument_with_the_name_of_a_keyword_stays_the_scripts(own):
    parser = options()
    left = {field.name for field in dataclasses.fields(Options)} - names_of(parser.parse_args([]))
    assert {"clip_norm", "clip_value", "same_data", "report_errors"} <= left
    mine = [flag for flag in own if flag[2:].replace("-", "_") in left]
    for flag in mine:
        parser.add_argument(flag, type=float, default=0.5)
    args = parser.parse_args([word for flag in mine for word in (flag, "7")])
    assert Options.of(args, {}) == Options()
    assert all(getattr(args, flag[2:].replace("-", "_")) == 7 for flag in mine)


@pytest.mark.parametrize(
    "replace",
    [
        lambda parser: parser.add_argument("--resume", default=""),
        lambda parser: parser.add_argument_group("own").add_argument("--resume", default=""),
        lambda parser: parser.add_argument("--continue", dest="resume", default=""),
    ],
    ids=["option", "in-a-group", "other-flag"],
)
def test_argument_that_replaces_an_option_is_the_scripts(replace, capsys):
    parser = options(conflict_handler="resolve")
    replace(parser)
    args = parser.parse_args(["--epochs", "3"])
    assert args.resume == ""
    assert Options.of(args, {}) == Options(epochs=3)
    with pytest.raises(SystemExit):  # what is left of hpctrain's would set the script's value
        parser.parse_args(["--no-resume"])
    assert "unrecognized arguments: --no-resume" in capsys.readouterr().err
    assert "--no-resume" not in parser.format_help()


def test_argument_of_a_parent_replaces_an_option():
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--epochs", type=int, default=300)
    parent.add_argument("--width", type=int, default=8)
    args = options(parents=[parent], conflict_handler="resolve").parse_args(["--seed", "3"])
    assert (args.epochs, args.width) == (300, 8)
    assert Options.of(args, {}) == Options(seed=3)


def test_argument_of_a_subcommand_is_the_scripts():
    parser = options()
    train = parser.add_subparsers().add_parser("train")
    train.add_argument("--seed", type=int)
    args = parser.parse_args(["--epochs", "3", "train", "--seed", "5"])
    assert args.seed == 5
    assert Options.of(args, {}) == Options(epochs=3)


@pytest.mark.parametrize("own", [options, None], ids=["argument", "parent"])
def test_second_argument_of_one_name_is_rejected(own, capsys):
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--epochs")
    with pytest.raises(SystemExit) as caught:
        own().add_argument("--epochs") if own else options(parents=[parent])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "add_argument('--epochs'), but hpctrain.options() already has this option" in printed
    assert 'conflict_handler="resolve"' in printed


def test_dict_has_names_of_options_alone():
    given = {"backend": "ddp", "max_steps": 4}
    assert Options.of(given, {"max_steps": 5}) == Options(backend="ddp", max_steps=5)
    for name, near in (("max_step", "max_steps"), ("checkpoint_evry", "checkpoint_every")):
        with pytest.raises(UsageError, match=f"{name}= in the dict is not an option") as caught:
            hpctrain.Session({name: 5})
        assert caught.value.code == "HT501"
        assert caught.value.fixes[0] == f"{near}=…"
    with pytest.raises(UsageError) as caught:
        hpctrain.Session({"checkpoint_steps": 5})
    assert caught.value.fixes[:2] == ("checkpoint_minutes=…", "checkpoint_every=…")
    with pytest.raises(UsageError, match="width= in the dict"):
        Options.of({"width": 64}, {})


def test_micro_batch_size_is_set_in_a_session_where_the_option_is_none():
    marked, table = options().parse_args([]), {"batch_size": None}
    foreign = argparse.Namespace(batch_size=None)
    for given, size in ((marked, 24), (table, 24), (foreign, None)):
        with hpctrain.Session(given, global_batch=24):
            assert (given if given is table else vars(given))["batch_size"] == size
    # Another session takes the batch size of its own loader.
    assert (marked.batch_size, table["batch_size"], foreign.batch_size) == (None, None, None)


def test_help_shows_at_most_forty_options():
    shown = re.findall(r"^  (--?\w[\w-]*)", options().format_help(), re.M)
    assert {"--backend", "--ddp", "--epochs"} < set(shown)
    assert len(shown) <= 40


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--epoch 3", "; did you mean --epochs?\n"),
        ("--ema-decai 1", "; did you mean --ema-decay?\n"),
        ("--zzz", "--zzz\n"),
    ],
)
def test_unknown_option_is_rejected_with_the_nearest(line, hint, capsys):
    parser = options()
    parser.add_argument("--ema-decay", type=float)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.partition("\n")[0].endswith(hint.strip("\n"))
