"""The training options: one meaning on the command line and as keyword arguments."""

import argparse
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain
from hpctrain.arguments import Batches, Options, options, plan_batches
from hpctrain.errors import UsageError


def test_command_line_and_keywords_have_the_same_defaults():
    assert hpctrain.options is options
    parsed = vars(options(recipe=True).parse_args([]))
    assert parsed == {**dataclasses.asdict(Options()), "data": "digits"}
    assert Options.of(options().parse_args([]), {}) == Options.of(None, {}) == Options()


def test_help_without_the_recipe_fits_on_two_screens(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert options(prog="train.py").format_help().count("\n") <= 60
    few, all_of_them = (vars(options(recipe=recipe).parse_args([])) for recipe in (False, True))
    assert len(few) <= 30
    assert few.items() < all_of_them.items()
    start = {"backend", "precision", "global_batch", "epochs", "max_steps", "seed", "resume"}
    assert start < few.keys()
    assert few.keys().isdisjoint({"data", "lr", "lr_schedule", "decay", "ema", "clip_norm"})


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--lr-schedule cosine", "; hpctrain.options(recipe=True) has --lr-schedule\n"),
        ("--lr-shedule=cosine", "; hpctrain.options(recipe=True) has --lr-schedule\n"),
        ("--no-channels-last", "; hpctrain.options(recipe=True) has --channels-last\n"),
        ("--epoch 3", "; did you mean --epochs?\n"),
        ("--ema-decai 1", "; did you mean --ema-decay?\n"),
        ("--zzz", "--zzz\n"),
    ],
)
def test_option_that_only_the_recipe_has_is_refused_with_this_hint(line, hint, capsys):
    parser = options()
    parser.add_argument("--ema-decay", type=float)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.partition("\n")[0].endswith(hint.strip("\n"))


def test_script_may_have_its_own_option_of_a_name_that_only_the_recipe_has(capsys):
    parser = options()
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--data", type=Path)
    namespace = parser.parse_args(["--data", "there"])
    assert Options.of(namespace, {}) == Options(lr=0.5, data="there")
    parser = options()
    parser.add_argument("--decay", type=float)
    with pytest.raises(UsageError, match=r"--decay 0\.1") as caught:
        Options.of(parser.parse_args(["--decay", "0.1"]), {})
    assert any("another name" in fix for fix in caught.value.fixes)


def test_options_of_a_dict_and_the_values_of_the_script():
    given = {"backend": "ddp", "lr": 0.25, "width": 64}
    assert Options.of(given, {"lr": 0.5}) == Options(backend="ddp", lr=0.5)
    with pytest.raises(UsageError, match="--lr -1"):
        Options.of({"lr": -1}, {})


@pytest.mark.parametrize("given", [options(), "--lr 1", Options()], ids=lambda v: type(v).__name__)
def test_session_takes_a_parsed_command_line_or_a_dict(given):
    with pytest.raises(UsageError, match=f"a {type(given).__name__}") as caught:
        hpctrain.Session(given)
    assert caught.value.code == "HT501"
    assert "hpctrain.Session(parser.parse_args())" in caught.value.fixes


def test_every_option_reaches_its_field():
    line = (
        "--data mnist --download --run-dir there --no-resume --elastic "
        "--backend ddp --precision O2 --loss-scale 128 --no-keep-batchnorm-fp32 --max-nonfinite 9 "
        "--global-batch 96 --batch-size 8 --accumulate 3 --epochs 2 --max-steps 7 --seed 5 "
        "--no-seed-everything --no-handle-signals --no-report-errors --deterministic --same-data "
        "--workers 4 --lr 0.5 --lr-scaling linear --lr-reference-batch 32 "
        "--lr-warmup-epochs 0.5 --lr-schedule step --lr-step-epochs 4 --lr-step-factor 0.2 "
        "--lr-power 1.5 --decay weights --clip-norm 1.5 --clip-value 2.5 --ema 0.99 "
        "--sync-batchnorm --no-channels-last --compile --log-every 1 "
        "--checkpoint-every 20 --memory-checkpoint-every 3 --checkpoint-minutes 5 "
        "--keep-checkpoints 4 --keep-best top1 --track wandb --profile 3:5 "
        "--start-timeout 30 --timeout 60 --ddp-compression powersgd "
        "--ddp-powersgd-rank 2 --ddp-powersgd-start 5 --ddp-bucket-mb 1 --ddp-static-graph "
        "--no-ddp-gradient-as-bucket-view --horovod-op sum "
        "--horovod-compression fp16 --horovod-gradient-predivide-factor 2 --horovod-groups 3 "
        "--horovod-sparse-as-dense --check-replicas-every 7 --fsdp-blocks Block --no-fsdp-reshard "
        "--fsdp-hybrid --fsdp-offload --activation-checkpointing"
    )
    read = Options.of(options(recipe=True).parse_args(line.split()), {})
    assert read == Options(
        data="mnist", download=True, run_dir="there", resume=False, elastic=True,
        backend="ddp", precision="O2", loss_scale=128.0, keep_batchnorm_fp32=False,
        fsdp_blocks="Block", fsdp_reshard=False, fsdp_hybrid=True, fsdp_offload=True,
        activation_checkpointing=True,
        max_nonfinite=9, check_replicas_every=7, global_batch=96, batch_size=8, accumulate=3,
        epochs=2, max_steps=7, seed=5,
        seed_everything=False, handle_signals=False, report_errors=False, deterministic=True,
        same_data=True, workers=4, lr=0.5, lr_scaling="linear", lr_reference_batch=32,
        lr_warmup_epochs=0.5, lr_schedule="step", lr_step_epochs=4, lr_step_factor=0.2,
        lr_power=1.5, decay="weights", clip_norm=1.5, clip_value=2.5, ema=0.99,
        sync_batchnorm=True, channels_last=False, compile=True, log_every=1, checkpoint_every=20,
        memory_checkpoint_every=3, checkpoint_minutes=5.0, keep_checkpoints=4, keep_best="top1",
        track="wandb", profile="3:5", start_timeout=30.0, timeout=60.0,
        ddp_compression="powersgd", ddp_powersgd_rank=2,
        ddp_powersgd_start=5, ddp_bucket_mb=1, ddp_static_graph=True,
        ddp_gradient_as_bucket_view=False, horovod_op="sum", horovod_compression="fp16",
        horovod_gradient_predivide_factor=2.0, horovod_groups=3, horovod_sparse_as_dense=True,
    )  # fmt: skip
    assert Options.of(None, dataclasses.asdict(read)) == read
    assert Options.of(options().parse_args(["--workers", "auto"]), {}).workers == "auto"
    # These two contradict others of the line.
    line = ["--lr-warmup-steps", "5", "--lr-min", "0.1"]
    read_rates = Options.of(options(recipe=True).parse_args(line), {"data": None})
    assert read_rates == Options(lr_warmup_steps=5, lr_min=0.1)
    same = {f.name for f in dataclasses.fields(Options) if getattr(read, f.name) == f.default}
    assert same == {"lr_warmup_steps", "lr_min", "ddp_find_unused_parameters"}


DDP = {
    *("compression", "powersgd_rank", "powersgd_start", "bucket_mb", "static_graph"),
    "find_unused_parameters",
    "gradient_as_bucket_view",
}


def test_backend_options_of_another_backend_are_refused():
    chosen = Options.of(None, {"backend": "horovod", "horovod_op": "sum"})
    assert chosen.of_backend("horovod") == {
        "op": "sum",
        "compression": "none",
        "gradient_predivide_factor": 1.0,
        "groups": None,
        "sparse_as_dense": False,
    }
    assert set(Options().of_backend("ddp")) == DDP
    assert Options().of_backend("single") == {}
    with pytest.raises(UsageError, match="--horovod-op with --backend ddp") as raised:
        dataclasses.replace(chosen, backend="ddp").of_backend("ddp")
    assert raised.value.fixes == ("--backend horovod", "leave --horovod-op out")
    assert raised.value.code == "HT503"
    with pytest.raises(UsageError, match="--backend auto, which is single here"):
        dataclasses.replace(chosen, backend="auto").of_backend("single")


def test_elastic_needs_a_global_batch():
    with pytest.raises(UsageError, match="--elastic without --global-batch") as raised:
        plan_batches(Options.of(None, {"elastic": True, "batch_size": 4}), 3)
    assert raised.value.code == "HT504"
    assert plan_batches(Options.of(None, {"elastic": True, "global_batch": 12}), 3).batch_size == 4


def test_keywords_override_the_command_line():
    parser = options(recipe=True, description="mine")
    parser.add_argument("--width", type=int, default=64)
    namespace = parser.parse_args(["--width", "8", "--lr", "0.5", "--seed", "3"])
    read = Options.of(namespace, {"lr": 0.25, "batch_size": 16})
    assert (read.lr, read.seed, read.batch_size) == (0.25, 3, 16)
    assert namespace.width == 8
    assert Options.of(argparse.Namespace(width=8), {}) == Options()


@pytest.mark.parametrize(
    ("keywords", "found", "fix"),
    [
        ({"batchsize": 8}, "batchsize=", "batch_size=…"),
        ({"learning_rate": 1}, "learning_rate=", ""),
        ({"precison": "bf16"}, "precison=", "precision=…"),
        ({"precision": "bf61"}, "--precision bf61", "--precision bf16"),
        ({"backend": "dpd"}, "--backend dpd", "--backend ddp"),
        ({"backend": None}, "--backend None", "--backend "),
        ({"batch_size": 0}, "--batch-size 0", ""),
        ({"batch_size": 2.0}, "--batch-size 2.0", ""),
        ({"batch_size": "8"}, "--batch-size '8'", ""),
        ({"accumulate": True}, "--accumulate True", ""),
        ({"workers": -1}, "--workers -1", ""),
        ({"workers": "all"}, "--workers 'all'", ""),
        ({"seed": -1}, "--seed -1", ""),
        ({"seed": None}, "--seed None", ""),
        ({"log_every": None}, "--log-every None", ""),
        ({"max_steps": 0}, "--max-steps 0", ""),
        ({"lr": 0}, "--lr 0", ""),
        ({"lr": -1.0}, "--lr -1.0", ""),
        ({"lr": float("nan")}, "--lr nan", ""),
        ({"lr": "0.1"}, "--lr '0.1'", ""),
        ({"lr": None}, "--lr None", ""),
        ({"clip_norm": 0.0}, "--clip-norm 0.0", ""),
        ({"timeout": float("inf")}, "--timeout inf", ""),
        ({"deterministic": "yes"}, "--deterministic 'yes'", ""),
        ({"data": 3}, "--data 3", ""),
    ],
)
def test_wrong_keywords_are_refused_as_on_the_command_line(keywords, found, fix):
    with pytest.raises(UsageError) as caught:
        Options.of(None, keywords)
    assert found in caught.value.found
    assert caught.value.expected
    assert any(fix in one for one in caught.value.fixes) or not fix
    assert caught.value.code == "HT501"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("keywords", "code", "found", "fix"),
    [
        ({"lr_warmup_epochs": 5.0, "epochs": 5}, "HT411", "5 with --epochs 5", "warmup-epochs 0"),
        ({"lr_warmup_steps": 9, "max_steps": 9}, "HT411", "9 with --max-steps 9", "warmup-steps 0"),
        ({"lr_warmup_steps": 9, "lr_warmup_epochs": 1.5}, "HT411", "1.5 and", "warmup-steps 0"),
        ({"lr_min": 0.1, "lr_schedule": "step"}, "HT406", "--lr-min 0.1 with", "--lr-min 0"),
    ],
)
def test_options_of_the_rate_that_contradict_each_other_are_refused(keywords, code, found, fix):
    with pytest.raises(UsageError) as caught:
        Options.of(None, keywords)
    assert found in caught.value.found
    assert any(fix in one for one in caught.value.fixes)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "keywords",
    [
        {"lr": 1},
        {"lr_warmup_steps": 8, "max_steps": 9, "epochs": 1},
        {"lr_min": 0.1, "lr_schedule": "polynomial"},
        {"clip_norm": None, "epochs": None, "resume": None, "run_dir": None},
        {"workers": 0, "seed": 0, "batch_size": 1},
    ],
)
def test_option_values_at_the_edge_are_accepted(keywords):
    read = Options.of(None, keywords)
    assert {name: getattr(read, name) for name in keywords} == keywords


def test_option_paths_may_be_path_objects():
    read = Options.of(None, {"run_dir": Path("runs/a"), "data": Path("sets/b")})
    assert (read.run_dir, read.data) == ("runs/a", "sets/b")


@pytest.mark.parametrize(
    "line",
    [
        "--batch-size 0",
        "--batch-size 8.0",
        "--seed -1",
        "--lr 0",
        "--lr nan",
        "--timeout inf",
        "--precision fp4",
        "--backend mpi",
        "--batch 8",  # no abbreviations: a script may have options of its own
    ],
)
def test_command_line_refuses_wrong_values(line, capsys):
    with pytest.raises(SystemExit) as caught:
        options().parse_args(line.split())
    assert caught.value.code == 2
    assert line.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("total", "size", "times", "world", "expected"),
    [
        (None, None, None, 1, (32, 32, 1)),
        (None, None, None, 4, (128, 32, 1)),
        (None, 8, None, 4, (32, 8, 1)),
        (None, None, 3, 2, (192, 32, 3)),
        (None, 8, 3, 2, (48, 8, 3)),
        (96, None, None, 4, (96, 24, 1)),
        (96, None, 3, 4, (96, 8, 3)),
        (96, 8, None, 4, (96, 8, 3)),
        (96, 8, 3, 4, (96, 8, 3)),
        (1, None, None, 1, (1, 1, 1)),
    ],
)
def test_global_batch_batch_size_and_accumulation_are_derived(total, size, times, world, expected):
    chosen = Options(global_batch=total, batch_size=size, accumulate=times)
    assert plan_batches(chosen, world) == Batches(*expected)


@pytest.mark.parametrize(
    ("total", "size", "times", "world", "found", "fix"),
    [
        (10, None, None, 4, "4 ranks", "--global-batch 8, --global-batch 12"),
        (3, None, None, 4, "4 ranks", "--global-batch 4"),
        (100, None, 3, 4, "4 ranks × 3 accumulated", "--global-batch 96, --global-batch 108"),
        (100, 8, None, 4, "4 ranks × 8 (--batch-size)", "--global-batch 96, --global-batch 128"),
        (16, 8, None, 4, "4 ranks × 8 (--batch-size)", "--global-batch 32"),
        (
            96,
            8,
            2,
            4,
            "--batch-size 8 × --accumulate 2 = 64",
            "--global-batch 64, leave one of the three out",
        ),
    ],
)
def test_global_batch_that_does_not_divide_is_refused_with_the_nearest(
    total, size, times, world, found, fix
):
    chosen = Options(global_batch=total, batch_size=size, accumulate=times)
    with pytest.raises(UsageError) as caught:
        plan_batches(chosen, world)
    assert f"--global-batch {total}" in caught.value.found
    assert found in caught.value.found
    assert ", ".join(caught.value.fixes) == fix
    assert caught.value.code == "HT505"
    assert caught.value.exit_code == 2


_SOME = st.none() | st.integers(1, 40)


@given(st.none() | st.integers(1, 400), _SOME, _SOME, st.integers(1, 9))
def test_global_batch_is_the_product_for_any_plan(total, size, times, world):
    chosen = Options(global_batch=total, batch_size=size, accumulate=times)
    try:
        plan = plan_batches(chosen, world)
    except UsageError as error:
        assert total is not None
        assert total % (world * (size or 1) * (times or 1)) or (size and times)
        mended = [int(fix.split()[1]) for fix in error.fixes if fix.startswith("--global-batch ")]
        assert mended
        for one in mended:
            plan = plan_batches(dataclasses.replace(chosen, global_batch=one), world)
            assert plan.global_batch == one
    else:
        assert plan.global_batch == plan.batch_size * plan.accumulate * world
        assert total in (None, plan.global_batch)
        assert size in (None, plan.batch_size)
        assert times in (None, plan.accumulate)
