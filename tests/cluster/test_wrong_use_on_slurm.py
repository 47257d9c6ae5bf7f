"""Errors that all ranks of a Slurm job raise: printed once, with exit code 2."""

import launches
import pytest

pytestmark = pytest.mark.slurm

TRAIN = """
import hpctrain
from hpctrain.errors import UsageError

parser = hpctrain.options()
parser.add_argument("--alike", type=int, default=1)
arguments = parser.parse_args()
with hpctrain.Session(arguments, batch_size=1, start_timeout=60) as session:
    text = f"text {session.world.rank // arguments.alike}"
    raise UsageError.of_text("HT001", text, "another", "such")
"""
# Four ranks on two hosts: options, and the first line of each error that they cause.
CASES = {
    "--no-such-option": ["unrecognized arguments: --no-such-option"],
    "--global-batch 7": [
        "--global-batch 7 cannot be divided equally among 4 ranks × --batch-size 1"
    ],
    "--alike 4": ["text 0"],
    "--alike 2": ["text 0", "text 1"],
    "--alike 1": ["text 0", "text 1", "text 2", "text 3"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "hpctrain run",
        # Slurm ends the other ranks as soon as one has ended.
        "srun --kill-on-bad-exit=1 python",
        "srun --kill-on-bad-exit=1 hpctrain run",
    ],
)
def test_error_of_all_ranks_is_printed_once_with_exit_code_2(cluster, tmp_path, command):
    (tmp_path / "train.py").write_text(TRAIN)
    script = tmp_path / "job.sh"
    lines = [f"{command} train.py {options}; echo ended with $?" for options in CASES]
    exports = f"export PATH={launches.BIN}:$PATH OMP_NUM_THREADS=1"
    script.write_text("\n".join(["#!/bin/bash", exports, *lines, ""]))
    options = ["-N2", "--ntasks-per-node=2", "--output=%j.log"]
    number, code = cluster.batch([*options, str(script)], cwd=tmp_path)
    log = (tmp_path / f"{number}.log").read_text()
    assert code == 0, log
    *parts, rest = log.split("ended with 2\n")
    assert (len(parts), rest) == (len(CASES), ""), log
    for part, expected in zip(parts, CASES.values(), strict=True):
        marked = [line for line in part.splitlines() if "hpctrain: error: " in line]
        assert sorted(line.partition("error: ")[2] for line in marked) == expected, part
        assert "Traceback" not in part
