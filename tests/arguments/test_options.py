"""The training options: one meaning on the command line and as keyword arguments."""

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
    defaults = dataclasses.asdict(Options())
    assert vars(options().parse_args([])).items() <= defaults.items()
    assert Options.of(options().parse_args([]), {}) == Options.of(None, {}) == Options()


@pytest.mark.parametrize("given", [options(), "--lr 1", Options()], ids=lambda v: type(v).__name__)
def test_session_takes_a_parsed_command_line_or_a_dict(given):
    with pytest.raises(UsageError, match=f"a {type(given).__name__}") as caught:
        hpctrain.Session(given)
    assert caught.value.code == "HT501"
    assert "hpctrain.Session(hpctrain.options().parse_args())" in caught.value.fixes
    assert not any("vars(" in fix for fix in caught.value.fixes)


def test_every_option_reaches_its_field():
    line = (
        "--run-dir there --no-resume --resume-from before --restore model --elastic "
        "--device cpu --backend ddp --precision O2 --loss-scale 128 "
        "--no-keep-batchnorm-fp32 --max-nonfinite 9 --check-replicas-every 7 "
        "--global-batch 96 --batch-size 8 --accumulate 3 --epochs 2 --max-steps 7 --seed 5 "
        "--deterministic --workers 4 --sync-batchnorm --no-channels-last --compile --log-every 1 "
        "--checkpoint-every 20 --checkpoint-minutes 5 "
        "--keep-checkpoints 4 --no-checkpoint-frozen --keep-best top1 --track wandb "
        "--profile 3:5 --start-timeout 30 "
        "--timeout 60 --activation-checkpointing --ddp static-graph --fsdp hybrid "
        "--horovod op=sum"
    )
    read = Options.of(options().parse_args(line.split()), {
        "seed_everything": False, "handle_signals": False, "report_errors": False,
        "same_data": True, "clip_norm": 1.5, "clip_value": 2.5,
    })  # fmt: skip
    assert read == Options(
        run_dir="there", resume=False, resume_from="before", restore="model", elastic=True,
        device="cpu", backend="ddp", precision="O2",
        loss_scale=128.0, keep_batchnorm_fp32=False, max_nonfinite=9, check_replicas_every=7,
        global_batch=96, batch_size=8, accumulate=3, epochs=2, max_steps=7, seed=5,
        deterministic=True, workers=4, sync_batchnorm=True, channels_last=False, compile=True,
        log_every=1, checkpoint_every=20, checkpoint_minutes=5.0,
        keep_checkpoints=4, checkpoint_frozen=False, keep_best="top1", track="wandb",
        profile="3:5", start_timeout=30.0,
        timeout=60.0, activation_checkpointing=True, ddp="static-graph", fsdp="hybrid",
        horovod="op=sum", seed_everything=False, handle_signals=False, report_errors=False,
        same_data=True, clip_norm=1.5, clip_value=2.5,
    )  # fmt: skip
    assert Options.of(None, dataclasses.asdict(read)) == read
    assert Options.of(options().parse_args(["--workers", "auto"]), {}).workers == "auto"
    fields = dataclasses.fields(Options)
    assert [field.name for field in fields if getattr(read, field.name) == field.default] == []


def test_elastic_needs_a_global_batch():
    with pytest.raises(UsageError, match="--elastic without --global-batch") as raised:
        plan_batches(Options.of(None, {"elastic": True, "batch_size": 4}), 3)
    assert raised.value.code == "HT504"
    assert plan_batches(Options.of(None, {"elastic": True, "global_batch": 12}), 3).batch_size == 4


def test_keywords_override_the_command_line():
    parser = options(description="mine")
    parser.add_argument("--width", type=int, default=64)
    namespace = parser.parse_args(["--width", "8", "--epochs", "5", "--seed", "3"])
    read = Options.of(namespace, {"epochs": 2, "batch_size": 16})
    assert (read.epochs, read.seed, read.batch_size) == (2, 3, 16)
    assert namespace.width == 8


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
        ({"clip_norm": 0.0}, "clip_norm=0.0", ""),
        ({"clip_norm": -1.0}, "clip_norm=-1.0", ""),
        ({"clip_value": float("nan")}, "clip_value=nan", ""),
        ({"clip_value": "0.1"}, "clip_value='0.1'", ""),
        ({"same_data": None}, "same_data=None", ""),
        ({"timeout": float("inf")}, "--timeout inf", ""),
        ({"deterministic": "yes"}, "--deterministic 'yes'", ""),
        ({"run_dir": 3}, "--run-dir 3", ""),
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
    "keywords",
    [
        {"clip_norm": 1, "clip_value": 0.5},
        {"max_steps": 9, "epochs": 1},
        {"clip_norm": None, "epochs": None, "resume": None, "run_dir": None},
        {"workers": 0, "seed": 0, "batch_size": 1},
    ],
)
def test_option_values_at_the_edge_are_accepted(keywords):
    read = Options.of(None, keywords)
    assert {name: getattr(read, name) for name in keywords} == keywords


def test_option_paths_may_be_path_objects():
    assert Options.of(None, {"run_dir": Path("runs/a")}).run_dir == "runs/a"


@pytest.mark.parametrize(
    "line",
    [
        "--batch-size 0",
        "--batch-size 8.0",
        "--seed -1",
        "--checkpoint-minutes nan",
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
        (100, None, 3, 4, "4 ranks × --accumulate 3", "--global-batch 96, --global-batch 108"),
        (
            100,
            8,
            None,
            4,
            "4 ranks × --batch-size 8",
            "--batch-size 5, --global-batch 96, --global-batch 128",
        ),
        (16, 8, None, 4, "4 ranks × --batch-size 8", "--batch-size 4, --global-batch 32"),
        (18, 8, None, 4, "4 ranks × --batch-size 8", "--global-batch 32"),
        (
            96,
            8,
            2,
            4,
            "--batch-size 8 × --accumulate 2 = 64",
            "--global-batch 64, omit --global-batch, --batch-size or --accumulate",
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
        for one in (int(fix.split()[1]) for fix in error.fixes if fix.startswith("--batch-size ")):
            plan = plan_batches(dataclasses.replace(chosen, batch_size=one), world)
            assert (plan.global_batch, plan.batch_size) == (total, one)
    else:
        assert plan.global_batch == plan.batch_size * plan.accumulate * world
        assert total in (None, plan.global_batch)
        assert size in (None, plan.batch_size)
        assert times in (None, plan.accumulate)
