"""A finding for each wrong script, none for the right ones, and no error for any text."""

import argparse
import io
import itertools
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cli import lint as command
from hpctrain.errors import UsageError
from hpctrain.jobs import lint as package
from hpctrain.jobs.lint import lint
from hpctrain.jobs.lint.launches import Launch
from hpctrain.jobs.lint.shell import Shell, as_in_task, plain

TOP = Path(__file__).resolve().parents[2]
SCRIPTS = TOP / "tests" / "jobs" / "scripts"
# The folder with the Python scripts that some of them start.
PROGRAMS = SCRIPTS / "programs"
# The line of the mistake in each of tests/jobs/scripts/wrong; file names begin with the rule.
WRONG = {
    "cpus-dropped": 7,
    "cpus-dropped-program": 6,
    "directive-ignored": 5,
    "directive-ignored-continued": 3,
    "directive-ignored-indented": 3,
    "directive-ignored-misspelt": 3,
    "directive-ignored-space": 3,
    "directive-refused": 2,
    "directive-refused-dash": 3,
    "directive-refused-equals": 2,
    "directive-refused-quote": 3,
    "directive-refused-signal": 3,
    "directive-refused-time": 3,
    "directive-variable": 3,
    "directive-variable-home": 3,
    "dos-line-ends": 4,
    "export-cut": 3,
    "export-cut-of-srun": 5,
    "export-none": 6,
    "fixed-port": 6,
    "fixed-port-accelerate": 6,
    "fixed-port-endpoint": 6,
    "fixed-port-torchrun": 6,
    "fixed-port-variable": 9,
    "gpu-isolation": 6,
    "gpu-isolation-bind": 6,
    "gpu-isolation-closest": 8,
    "horovod-alone": 6,
    "hosts-apart": 6,
    "hosts-apart-address": 6,
    "hosts-apart-endpoint": 5,
    "hosts-apart-list": 5,
    "hosts-apart-one-node": 7,
    "hosts-apart-own-address": 6,
    "hosts-apart-own-port": 6,
    "idle-gpus": 7,
    "idle-gpus-srun": 7,
    "log-folder-missing": 3,
    "log-folder-missing-job": 3,
    "log-truncated": 3,
    "manual-gpus": 5,
    "manual-rank": 5,
    "manual-rank-arithmetic": 5,
    "manual-rank-before-srun": 5,
    "manual-rank-gpu": 6,
    "manual-rank-local": 5,
    "manual-rank-node": 7,
    "manual-rank-world-size": 5,
    "manual-rank-world-size-of-node": 7,
    "manual-rank-world-size-product": 6,
    "memory-in-megabytes": 3,
    "missing-cpus": 4,
    "missing-cpus-torchrun": 2,
    "missing-srun": 10,
    "missing-srun-activate": 6,
    "missing-srun-alone": 5,
    "missing-srun-horovodrun": 6,
    "missing-srun-once": 5,
    "missing-srun-one-node": 7,
    "missing-srun-torchrun": 5,
    "no-kill-on-bad-exit-container": 5,
    "no-shebang": 1,
    "no-time-to-save": 3,
    "no-time-to-train": 4,
    "no-wait": 5,
    "not-exported": 5,
    "not-exported-in-task": 5,
    "one-after-another": 7,
    "one-after-another-accelerate": 8,
    "one-after-another-packed": 7,
    "one-after-another-ssh": 7,
    "open-quote": 4,
    "option-twice": 5,
    "rank-of-batch-shell": 6,
    "rank-of-batch-shell-escaped": 7,
    "rank-of-batch-shell-file": 6,
    "rank-of-batch-shell-here-document": 5,
    "requeue-revives": 8,
    "requeue-revives-trap": 7,
    "run-without-exec": 7,
    "run-without-exec-ignored": 6,
    "sbatch-in-job": 5,
    "script-path": 4,
    "script-path-source": 4,
    "secret-in-script": 4,
    "secret-in-script-key": 4,
    "several-agents": 7,
    "several-agents-horovodrun": 6,
    "several-agents-mpirun": 7,
    "several-agents-run": 4,
    "shell-function": 6,
    "shell-function-in-task": 7,
    "shell-function-srun": 5,
    "signal-not-to-shell": 3,
    "signal-without-trap": 3,
    "signal-without-trap-other": 3,
    "tasks-and-gpus": 6,
    "tasks-and-gpus-accelerate": 9,
    "tasks-and-gpus-nproc": 5,
    "tasks-and-gpus-run": 4,
    "trap-lost": 6,
    "trap-waits": 7,
    "unknown-option": 3,
    "unknown-option-ambiguous": 2,
    "unknown-option-of-srun": 3,
}


def text_of(path):
    return path.read_bytes().decode()


def rules(text, folder=Path("/nowhere")):
    return [finding.rule for finding in lint(text, folder)]


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add(parser)
    parsed = parser.parse_args([*map(str, arguments)])
    return parsed.command(parsed)


def test_lint_table_has_every_wrong_script():
    assert {path.stem for path in (SCRIPTS / "wrong").iterdir()} == set(WRONG)


def test_lint_docs_have_the_number_of_mistakes_found():
    missed, right = ([*(SCRIPTS / name).iterdir()] for name in ("missed", "right"))
    assert not any(lint(text_of(path), PROGRAMS) for path in missed)
    page = " ".join((TOP / "docs" / "lint.md").read_text().split())
    assert f"finds {len(WRONG)} of {len(WRONG) + len(missed)} mistakes" in page
    assert f"nothing in the {len(right)} right scripts" in page


@pytest.mark.parametrize(("name", "line"), WRONG.items())
def test_lint_finds_only_the_planted_mistake(name, line):
    (finding,) = lint(text_of(SCRIPTS / "wrong" / f"{name}.sh"), PROGRAMS)
    assert finding.line == line
    assert name == finding.rule or name.startswith(f"{finding.rule}-")
    assert finding.reason
    assert finding.fixes
    assert all(finding.fixes)


# test_lint_finds_nothing_in_rendered_scripts checks those of sbatch/.
@pytest.mark.parametrize("path", sorted((SCRIPTS / "right").iterdir()), ids=lambda path: path.stem)
def test_lint_accepts_right_scripts(path):
    assert lint(text_of(path), PROGRAMS) == []


def blocks_of_docs():
    for path in [*TOP.glob("docs/*.md"), TOP / "README.md"]:
        for block in re.findall(r"```\w*\n(.*?)```", path.read_text(), re.DOTALL):
            if block.startswith("#!") and "\n#SBATCH" in block:
                yield pytest.param(path.name, block, id=path.stem)


@pytest.mark.parametrize(("name", "block"), list(blocks_of_docs()))
def test_lint_accepts_scripts_in_docs(name, block, tmp_path):
    # migrate.md shows an old script, which has this mistake.
    before = ["no-kill-on-bad-exit"] if name == "migrate.md" else []
    assert rules(block, tmp_path) == before


def test_lint_rules_have_wrong_script_and_docs():
    page = (TOP / "docs/lint.md").read_text()
    documented = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert len(documented) == len({*documented})
    planted = {name for name in documented if any(file.startswith(name) for file in WRONG)}
    assert planted == {*documented}
    sources = [path.read_text() for path in Path(package.__file__).parent.glob("*.py")]
    pattern = r'(?:yield .*?|_report\()"([a-z]+(?:-[a-z]+)+)",'
    assert {name for text in sources for name in re.findall(pattern, text)} == {*documented}


def test_lint_log_folder_that_exists(tmp_path):
    (tmp_path / "logs").mkdir()
    text = "#!/bin/bash\n#SBATCH --output=logs/%x/%A_%a.log\n"
    assert rules("#!/bin/bash\n#SBATCH --output=logs/%j.log\n", tmp_path) == []
    assert rules("#!/bin/bash\n#SBATCH -o./logs/%j.log -e ./%j.log\n", tmp_path) == []
    assert rules("#!/bin/bash\n#SBATCH -o logs/%x/out.log\n", tmp_path) == []
    assert rules(text, tmp_path) == []
    assert rules("#!/bin/bash\n#SBATCH -o logs/%A/%a.log\n", tmp_path) == ["log-folder-missing"]


# sbatch 22.05 accepts these lines.
@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH-N 2",
        "#SBATCH\t-N2 -n4",
        "#SBATCH -N 2 # it's two",
        "#SBATCH --comment=\"a # b\" -J 'c d'",
        "#SBATCH -N 2 \\",
        r"#SBATCH -J a\#b",
        "#SBATCH -vN 2",
        "#SBATCH --ntasks-per-n=2",
        "#SBATCH --exclusive --nice=5",
        "#SBATCH -t 1-2",
        "#SBATCH -t 1:30",
        "#SBATCH --mem=10GB",
        "#SBATCH --signal=BR:SIGUSR2@60 --no-kill",
        "##SBATCH --nodes=2",
        "#SBATCH --made-up-by-the-site=7",
    ],
)
def test_lint_directives_that_sbatch_accepts(line):
    found = rules(f"#!/bin/bash\n{line}\ntrap : USR2\nhostname\n")
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH: -N 2",
        "#SBATCH --nodes = 2",
        "#SBATCH -nodes=2",
        "#SBATCH --nodes",
        "#SBATCH -N",
        "#SBATCH --exclusive user",
        "#SBATCH --mem=10G B",
        '#SBATCH --comment="a\\"',
        "#SBATCH --signal=B:USR2@70000",
        "#SBATCH --signal=USR2@B:60",
        "#SBATCH --time=",
        "#SBATCH -Z",
    ],
)
def test_lint_directives_that_sbatch_refuses(line):
    assert rules(f"#!/bin/bash\n{line}\ntrap : USR2\nhostname\n") == ["directive-refused"]


@pytest.mark.parametrize(
    ("misspelt", "options"),
    [
        ("--ntasks_per_node=2", ["--ntasks-per-node"]),
        ("--gpu-per-node=2", ["--gpus-per-node"]),
        ("--cpu-per-task=2", ["--cpus-per-task"]),
        ("--partiton=gpu", ["--partition"]),
        ("--kill-on-bad-exit=1", ["srun --kill-on-bad-exit …"]),
        ("--nod=2", ["--nodefile", "--nodelist", "--nodes"]),
    ],
)
def test_lint_misspelt_option_suggests_nearest(misspelt, options):
    (finding,) = lint(f"#!/bin/bash\n#SBATCH {misspelt}\n", Path("/nowhere"))
    assert finding.rule == "unknown-option"
    assert finding.fixes[: len(options)] == tuple(f"type {one}" for one in options)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        # A misspelt option and a line that sbatch ignores count as what a person means.
        (
            "#SBATCH --nodess=2 --ntask-per-node=4 --time=24h\npython a.py",
            {"unknown-option", "directive-refused", "missing-srun"},
        ),
        ("# SBATCH --nodes=2\npython a.py", {"directive-ignored", "missing-srun"}),
        ("#SBATCH --nodes=2\n#SBATCH -n=8\npython a.py", {"directive-refused", "missing-srun"}),
        # What would be wrong with srun is found while it is not there.
        (
            "#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=2 --cpus-per-gpu=4\n"
            "export RANK=$SLURM_PROCID MASTER_ADDR=localhost\npython a.py",
            {"missing-srun", "tasks-and-gpus", "manual-rank", "hosts-apart"},
        ),
        # The rest of a line, after an option that sbatch refuses.
        (
            "#SBATCH --cpu-bind=cores -Z --mem=8\nhostname",
            {"unknown-option", "directive-refused", "memory-in-megabytes"},
        ),
    ],
)
def test_lint_finds_all_in_one_wave(lines, found):
    assert {*rules(f"#!/bin/bash\n{lines}\n")} >= found


def test_lint_fixes_of_srun_and_of_cpus_fit_together():
    job = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4 --ntasks-per-node=4"
    command = "python a.py"
    cpus, srun = lint(f"{job}\n{command}\n", Path("/nowhere"))
    assert (cpus.rule, srun.rule) == ("missing-cpus", "missing-srun")
    more = cpus.fixes[0].removeprefix("type #SBATCH ").partition(" ")[0]
    assert rules(f"{job} {more}\n{srun.fixes[0]}\n") == []


def test_lint_log_of_a_job_that_its_trap_requeues():
    trap = "trap 'scontrol requeue $SLURM_JOB_ID' USR1"
    script = "#!/bin/bash\n#SBATCH --signal=B:USR1@120"
    text = "\n" + trap + "\nsrun -n1 python a.py & wait $!\n"
    assert rules(script + text) == ["log-truncated"]
    assert rules(f"{script} --open-mode=append{text}") == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RANK", "SLURM_PROCID"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
        ("NODE_RANK", "SLURM_NODEID"),
        ("GROUP_RANK", "SLURM_NODEID"),
    ],
)
def test_lint_fix_for_rank_has_the_variable_of_that_rank(variable, value):
    script = "#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=4\n"
    text = f"{script}export {variable}=${value}\nsrun -K python a.py\n"
    (finding,) = lint(text, Path("/nowhere"))
    assert f"{variable}=${value} " in finding.fixes[0]
    fixed = finding.fixes[0].removeprefix("type ").replace("…", "a.py").replace("srun", "srun -K")
    assert rules(f"{script}{fixed}\n") == []


@pytest.mark.parametrize(
    ("directives", "fixed"),
    [
        ("--gpus-per-node=4 --ntasks-per-node=4", "--cpus-per-task=8 "),
        ("--gpus-per-node=4", "--cpus-per-task=32 "),
    ],
)
def test_lint_missing_cpus_fix_is_for_all_gpus_and_names_srun(directives, fixed):
    text = f"#!/bin/bash\n#SBATCH {directives}\nsrun -K torchrun a.py\n"
    (finding,) = [one for one in lint(text, Path("/nowhere")) if one.rule == "missing-cpus"]
    assert fixed in finding.fixes[0]
    assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"' in finding.fixes[0]


@pytest.mark.parametrize(
    ("directives", "command", "fixed"),
    [
        # Without rendezvous options, srun would start a separate training on each host.
        ("--ntasks-per-node=1", "torchrun --nproc-per-node 2 a.py --lr 1", "2 a.py --lr 1"),
        ("-n 8 -c 4", "torchrun --standalone --nproc-per-node=4 a.py", "--cpus-per-task=16 "),
        ("-n 2", "torchrun --nnodes 2 --node-rank $SLURM_NODEID -m a", " -m a"),
        ("-n 2", "python -m torch.distributed.run --master-addr=localhost a.py", "run --nnodes="),
        ("-n 2", 'torchrun --nnodes=2 --rdzv-endpoint="$head:$P" a.py', "torchrun --nnodes=2 --rd"),
        ("-n 2", "accelerate launch a.py", "--num_machines=$SLURM_JOB_NUM_NODES"),
        ("-n 2 -c 4", "python a.py", '--cpus-per-task="$SLURM_CPUS_PER_TASK" python a.py'),
        ("-n 2", "python a.py --rank $SLURM_PROCID", "bash -c 'python a.py --rank $SLURM_PROCID'"),
    ],
)
def test_lint_missing_srun_fix_is_right(directives, command, fixed):
    script = f"#!/bin/bash\n#SBATCH -N 2 {directives}\n"
    (finding,) = lint(script + command, Path("/nowhere"))
    assert finding.rule == "missing-srun"
    fix, *others = finding.fixes
    assert fixed in fix
    assert all(rules(script + other) == [] for other in others)
    assert ("--rdzv-backend=c10d" in fix) == ("torch" in command and "head" not in command)
    assert rules(script + fix) == []


@pytest.mark.parametrize(
    "step",
    [
        "srun -K torchrun --nnodes=2 a.py",
        "srun -K torchrun --nnodes=2 --master-addr 127.0.0.1 a.py",
        "srun -K torchrun --standalone --nproc_per_node $GPUS a.py $OPTIONS",
        "srun -K -N 2 --ntasks-per-node=1 apptainer exec a.sif torchrun a.py",
        "srun -K bash -c 'module load x; torchrun --nnode 1 a.py'",
        "export MASTER_ADDR=localhost\nsrun -K python a.py",
    ],
)
def test_lint_hosts_apart(step):
    assert rules(f"#!/bin/bash\n#SBATCH -N 2\n{step}\n") == ["hosts-apart"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hpctrain run a.py --once", ("hpctrain run", "run")),
        ("exec /env/bin/hpctrain run --retry --max-attempts 2 a.py", ("hpctrain run", "run")),
        ('"$PYTHON" -m hpctrain run -m a', ("hpctrain run", "run")),
        ("srun -K hpctrain run a.py", ("srun", "run")),
        ("srun bash -c 'cd x; hpctrain run a.py'", ("srun", "run")),
        ("srun apptainer exec --nv a.sif hpctrain run a.py", ("srun", "run")),
        ("hpctrain run --once -- srun python a.py", ("srun", "python")),
        ("hpctrain run --run-dir x --once -- torchrun a.py", ("", "agent")),
        ("hpctrain run --once a.py", ("", "python")),
        ("hpctrain doctor run", ("", "other")),
        ("hpctrain", ("", "other")),
    ],
)
def test_lint_recognizes_hpctrain_run(text, expected):
    (found,) = commands(text)
    assert (found.by, found.kind) == expected


def commands(text):
    return [Launch(command) for command in Shell(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b 'c d' \"e f\"", ["a", "b", "c d", "e f"]),
        ("a\\\n b # no\n", ["a", "b"]),
        ("a b#c", ["a", "b#c"]),
        ("a 2>&1 | b &>f & c", ["a", "2>&1"]),
        ("x='1 2'\na $x \"$x\"", ["a", "1", "2", "1 2"]),
        ("x=(b 'c d')\na \"${x[@]}\"", ["a", "${x[@]}"]),
        ("if y; then x=1; fi\na $x", ["a", "$x"]),
        ("x=1\nx=2\na $x", ["a", "$x"]),
        ("a $'b c' \\$d", ["a", "b c", "$d"]),
        ('a "$(b "c")" d', ["a", '$(b "c")', "d"]),
        ("exec env X=1 a b", ["a", "b"]),
        ("timeout -k 5 1h a b", ["a", "b"]),
    ],
)
def test_lint_parses_words_of_command(text, expected):
    found = [[plain(word) for word in one.argv] for one in commands(text)]
    assert [words for words in found if words[0] == "a"] == [expected]


def test_lint_parses_groups_functions_and_branches():
    shell = """\
f() {
    a | b &
}
{ c; if d; then e; fi; } &
for i in 1 2; do (g && h) & done
k
cat <<X; l
not a command
X
case $y in (m) n ;; o|p) q & ;; esac
r $(s `t`)
"""
    found = {one.argv[0]: one.command for one in commands(shell)}
    assert found.keys() >= {*"abcdeghklnqr", "cat"}
    assert not found.keys() & {"not", "s", "t", "if", "done", "esac"}
    assert {name for name, one in found.items() if one.background} == set("bq")
    assert {name for name, one in found.items() if not one.conditional} >= {*"klr", "cat"}
    assert {name for name, one in found.items() if one.conditional} >= set("abcdeghnq")
    assert [found[name].line for name in "aceklnr"] == [2, 4, 4, 6, 7, 10, 11]


def test_lint_parses_loops_prefixes_and_here_documents():
    shell = Shell(
        """\
for i in 1 2; do
    X=1 Y="a b" a $i
    while b; do c & done
done &
for j in 3; do d; done
e <<X
$x \\$y
X
while f; do g; done
"""
    )
    found = {one.words[0]: one for one in shell.commands}
    assert [found[name].loop for name in "abcdefg"] == [1, 1, 1, 5, 0, 9, 9]
    assert shell.parallel_loops == {0, 1}
    assert (found["a"].environment, found["a"].words) == ({"X": "1", "Y": "a b"}, ["a", "$i"])
    assert found["b"].environment == {}
    # Only the dollar that the batch shell leaves to the task.
    document = as_in_task(found["e"].document)
    assert document.endswith("$y")
    assert "$x" not in document


def test_lint_fills_no_variable_that_its_loop_changes():
    shell = Shell("n=0; m=1\na $n\nfor i in 1 2; do b $n $m; n=$((n + 1)); done\n")
    found = {one.words[0]: one.words for one in shell.commands}
    assert (found["a"], found["b"]) == (["a", "0"], ["b", "$n", "1"])


SNIPPETS = st.sampled_from(
    [
        *("#!/bin/bash\n", "#SBATCH ", "--nodes=2", "-n", " 4", "--signal=B:USR2@60", "\n", " "),
        *(
            "srun ",
            "python t.py",
            "torchrun ",
            "trap 'f' USR2",
            "$(",
            ")",
            "${",
            "}",
            "`",
            "((",
            "))",
        ),
        *("'", '"', "\\", "<<A", "\nA\n", "f() {", "case x in", "a)", ";;", "esac", "if", "then"),
        *(
            "fi",
            "&",
            "&&",
            "|",
            ";",
            "$x",
            "x=(",
            "x+=(1)",
            "x='y'",
            "export ",
            "#",
            "$0",
            "=",
            "\0",
        ),
        *("coproc ", "function ", "[[", "]]", "<(", ">", "2>&1", "$'", "é", "\r\n", "bash -c "),
    ]
)


@settings(deadline=None)
@given(st.lists(SNIPPETS, max_size=60).map("".join) | st.text(max_size=200))
def test_lint_reads_any_text(text):
    count = text.count("\n") + 1
    for finding in lint(text, Path("/nowhere")):
        assert 1 <= finding.line <= count
        assert finding.reason.isprintable()
        assert all(fix.isprintable() for fix in finding.fixes)


@pytest.mark.parametrize(
    "part",
    [
        *(
            "$(",
            '"$(',
            "a=(",
            "${a:-",
            "`",
            "(",
            "((",
            "{ a; ",
            "case a in b) ",
            "'",
            "\\",
            "f() { ",
        ),
        *("a=$a$a\n", "cat <<A\n", "#SBATCH -v", "x" * 99, "coproc a { ", "if a; then "),
        *(
            "cat <<A >x\n$SLURM_PROCID\nA\nsrun -n2 x\n",
            "for i in a; do srun -n1 a --rank $i;",
            "$((",
        ),
        *("MASTER_ADDR=1\n", "export RANK=$SLURM_PROCID a=1\n", "srun -n2 bash -c 'a=$b c $d'\n"),
        "a=1\nsrun -n2 bash -c 'python $a'\n",
        *("bash -c '", 'bash -c "', "srun " * 9, "-" * 9, "a;", "srun python a.py;", "sbatch x\n"),
    ],
)
def test_lint_reads_deep_and_long_scripts(part):
    whole = part * (2**17 // len(part))
    before = time.process_time()
    lint("#!/bin/bash\n#SBATCH -" + whole, Path("/nowhere"))
    lint("#!/bin/bash\n" + whole, Path("/nowhere"))
    assert time.process_time() - before < 4


def test_lint_reads_recursive_variables():
    names = "abcdefghijklmnop"
    pairs = itertools.pairwise(names)
    lines = [f"{name}=({' '.join([f'${{{other}[@]}}'] * 50)})" for name, other in pairs]
    text = "#!/bin/bash\n" + "\n".join([*lines, "p=()", '"${a[@]}"'])
    assert rules(text + "\n" + text.replace("(", "").replace(")", "").replace("[@]", "")) == []


def test_lint_prints_file_line_rule_and_fix(tmp_path, capsys):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH --time=24h\n")
    right = tmp_path / "right.sh"
    right.write_text("#!/bin/bash\n#SBATCH --ntasks=1\nhostname\n")
    assert run(right) == 0
    assert capsys.readouterr().out == ""
    assert run(right, script) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{script}:3: directive-refused: ")
    assert second.startswith("  fix:      type ")
    script.write_text("#!/bin/bash\n#SBATCH --nod=1\n")
    assert run(script) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        *("  fix:      type --nodefile", "  or:       type --nodelist", "  or:       type --nodes")
    ]


def test_lint_reads_standard_input(monkeypatch, capsys):
    text = b"#!/bin/bash\n#SBATCH --time=24h\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert run("-") == 1
    assert capsys.readouterr().out.startswith("standard input:2: directive-refused: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("folder", "cannot be read: Is a directory"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x7fELF\x02\x01\0\0", "is not text"),
        (b"#!/bin/bash\nhost\0name\n", "is not text"),
        (b"hostname\n", "neither #! nor #SBATCH"),
        (b"#!/bin/bash\n" + b"#" * 2**17, "more than 128 KiB"),
    ],
)
def test_lint_refuses_files_that_are_not_a_script(content, message, tmp_path):
    path = tmp_path / "job.sh"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        run(path)
    assert (caught.value.code, caught.value.exit_code) == ("HT824", 2)


def test_lint_shows_findings_of_other_files_when_one_is_missing(tmp_path, capsys):
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/bin/bash\n#SBATCH --time=24h\n")
    with pytest.raises(UsageError, match=r"nothere\.sh cannot be read"):
        run(wrong, tmp_path / "nothere.sh", wrong)
    found = capsys.readouterr().out
    assert found.count("directive-refused") == 2
    with pytest.raises(
        UsageError, match=r"(?s)a\.sh cannot be read.*b\.sh cannot be read"
    ) as caught:
        run(tmp_path / "a.sh", tmp_path / "b.sh")
    assert str(caught.value).count("  more:     hpctrain explain HT824") == 2


@pytest.mark.parametrize(
    ("name", "text", "command_line"),
    [
        ("train.py", "import torch\n", ("hpctrain submit -- python {}",)),
        ("train.py", "#!/usr/bin/env python3\nimport torch\n", ("hpctrain submit -- python {}",)),
        (
            "job.toml",
            "command = 'python train.py'\n",
            ("hpctrain render {} | hpctrain lint -", "hpctrain submit {}"),
        ),
    ],
)
def test_lint_names_the_command_for_python_and_toml_files(name, text, command_line, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match="not a batch script") as caught:
        run(path)
    assert caught.value.fixes == tuple(one.format(shlex.quote(str(path))) for one in command_line)
    assert "#!/bin/bash" not in str(caught.value)


def test_lint_reads_bytes_that_are_not_utf8(tmp_path, capsys):
    path = tmp_path / "job.sh"
    path.write_bytes(b"#!/bin/bash\n#SBATCH --job-name=\xe9$USER\n# \xff\x1b[31m\n")
    assert run(path) == 1
    assert "directive-variable" in capsys.readouterr().out


# Right scripts that look like a mistake.
@pytest.mark.parametrize(
    "text",
    [
        # The step is smaller than the job, or its size is unknown.
        "#SBATCH -N 2 --ntasks-per-node=4\nsrun -N1 -n1 python a.py",
        "#SBATCH -N 2 --ntasks-per-node=4\nsrun -n $RANKS python a.py",
        # The variable may have --kill-on-bad-exit.
        '#SBATCH -N 2\nstep=(srun)\nif x; then step+=(-K); fi\n"${step[@]}" python a.py',
        "#SBATCH -N 2\nsrun $SRUN_OPTIONS python a.py",
        "#SBATCH -N 2\nsrun -luK python a.py",
        "#SBATCH -N 2\nsrun -lK1 -n2 python a.py",
        "#SBATCH -N 2\nexport SLURM_KILL_BAD_EXIT=1\nsrun python a.py",
        # The rendezvous may be set elsewhere, or a separate training on each host may be intended.
        "#SBATCH -N 2\nsrun -K torchrun $OPTIONS a.py",
        '#SBATCH -N 2\nsrun -K torchrun "${OPTIONS[@]}" a.py',
        "#SBATCH -N 2\nexport PET_NNODES=2 PET_RDZV_ENDPOINT=$head\nsrun -K torchrun a.py",
        "#SBATCH -N 2\nif x; then srun -K torchrun --standalone a.py; fi",
        "#SBATCH -N 2\nsrun -K bash -c 'torchrun --standalone a.py --seed $SLURM_PROCID'",
        "#SBATCH -N 2\nsrun -K -n1 -N1 torchrun a.py",
        "#SBATCH -N 1 -n 4\nexport MASTER_ADDR=localhost\nsrun -K python a.py",
        "#SBATCH -N 2\nexport MASTER_ADDR=localhost\nsrun -K bash -c 'MASTER_ADDR=a python a.py'",
        "#SBATCH -N 2\nexport MASTER_ADDR=localhost\nif x; then MASTER_ADDR=$head; fi\n"
        "srun -K python a.py",
        # MPI ends its own ranks.
        "#SBATCH -N 2\nsrun ./a.out",
        # One task with several GPUs may be right.
        "#SBATCH --gpus-per-node=4 --ntasks-per-node=1 --exclusive\nsrun python a.py",
        "#SBATCH --gpus-per-node=4 --ntasks-per-node=2 --cpus-per-gpu=8\n"
        "srun -K --gpus-per-task=2 --gpu-bind=none "
        "python a.py",
        # exec gives the signal to srun, which gives it to the tasks.
        "#SBATCH --signal=B:USR2@120\nexec srun python a.py",
        # bash runs the trap for EXIT when a signal ends it.
        "#SBATCH --signal=B:USR2@120\ntrap clean EXIT\npython a.py",
        "#SBATCH --signal=B:CONT@120\npython a.py",
        "#SBATCH --signal=B:USR2@120\nsource traps.sh\nsrun python a.py",
        # Others wait for it.
        "srun python a.py & sleep 60",
        # On a single host, or on a host of the job alone.
        "#SBATCH --exclusive\nexport MASTER_PORT=29500\npython a.py",
        "#SBATCH --gres=gpu:4 --cpus-per-gpu=8\nexport CUDA_VISIBLE_DEVICES=0,1,2,3\npython a.py",
        "#SBATCH --exclusive\ntorchrun --nproc-per-node=4 --master-port 29500 a.py",
        "PORT=$((10000 + SLURM_JOB_ID % 20000))\ntorchrun --master-port $PORT a.py",
        "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 a.py",
        # One GPU, more CPUs than GPUs, or all of the node.
        "#SBATCH --gpus=1\npython a.py",
        "#SBATCH --gpus-per-node=2 -n 16 -N 1\ntorchrun --nproc-per-node=2 a.py",
        "#SBATCH --gpus-per-node=4 --exclusive\ntorchrun --nproc-per-node=4 a.py",
        "#SBATCH --gpus-per-node=4\nnvidia-smi",
        # For another script.
        'if [ -z "$SLURM_JOB_ID" ]; then cd "$(dirname "$0")"; fi',
        'cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}"',
        "sbatch $0",
        'unset "${!SLURM_@}"\nsbatch next.sbatch',
        "PASSWORD=${PASSWORD:?}\nAPI_KEY=$(cat key)\nHF_TOKEN=your-token-here",
        # The program starts its own processes on one node.
        "#SBATCH -n 8\npython a.py",
        "#SBATCH --ntasks-per-node=4 --gpus-per-node=4 -c 8\ntorchrun --nproc-per-node=4 a.py",
        "#SBATCH -N 4\npython -m hpctrain run --elastic a.py",
        # The agents have all CPUs and GPUs of their hosts, and the ranks variables of their own.
        "#SBATCH -N 4 -n 16 -c 8 --gpus-per-task=1\nexport RANK=0 MASTER_PORT=1\nhpctrain run a.py",
        '#SBATCH -N 2 --signal=B:USR2@120 --export=NONE\nexec "$PYTHON" -m hpctrain run -m a',
        "#SBATCH -N 2 --signal=B:USR2@120\ntrap 'echo early' USR2\nexec hpctrain run a.py",
        "#SBATCH -N 2 --signal=B:USR2@120\nsrun -K hpctrain doctor\nexec hpctrain run a.py",
        "#SBATCH -N 2 --signal=USR2@120\nhpctrain run a.py",
        "#SBATCH -N 2 --signal=B:CONT@120\nhpctrain run a.py",
        "#SBATCH -N 2\nexec hpctrain run --max-attempts 1 --once -- python starts_its_ranks.py",
        '#SBATCH -N 2 --signal=B:USR2@120\nexec hpctrain run --once -- "$@"',
        "#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=4 -c 32\nexec hpctrain run a.py",
        "#SBATCH -N 4\nssh node2 python a.py & python a.py\nwait",
        # Ranks of one task, of hosts that are named, or of a Horovod that gets them from MPI.
        "#SBATCH -n 8\nsrun -n 1 mpirun -np 8 python a.py",
        "#SBATCH -N 2\nhorovodrun -np 8 --hostfile hosts python a.py",
        # As many as srun starts, or ranks that a task starts itself.
        "#SBATCH -N 2 --ntasks-per-node=4\n"
        "export WORLD_SIZE=$(expr $SLURM_NTASKS_PER_NODE \\* $SLURM_NNODES)\nsrun -K python a.py",
        "#SBATCH -n 4 -N 1\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun -K python a.py",
        "#SBATCH -N 2 -n 2\nexport WORLD_SIZE=8\nsrun -K python a.py",
        # In the background, for all nodes at once, or again after a failure.
        "#SBATCH -N 2\nfor i in 0 1; do (srun -N1 -n1 -w node$i torchrun --nnodes=2 --node_rank=$i "
        "a.py) & done\nwait",
        "#SBATCH -N 2\nfor i in 1 2; do srun -K python a.py --seed $i; done\nwait",
        "#SBATCH -n 4\nfor i in 1 2; do srun -n1 python a.py $i; done",
        "#SBATCH -n 4\nrun() { srun -n1 python a.py $1; }\nfor i in 1 2; do run $i & done\nwait",
        # Something may define the function.
        "source ~/.bashrc\nconda activate a\npython a.py",
        "module load miniconda\nconda activate a\npython a.py",
        "if ml miniforge; then conda activate a; fi\npython a.py",
        "#SBATCH -N 2\nsrun -K bash -lc 'conda activate a && python a.py'",
        "#SBATCH -N 2\nsrun -K bash -c 'source x.sh; conda activate a; python a.py'",
        "#SBATCH -N 2 --container-image=a\nsrun -K bash -c 'conda activate a; python a.py'",
        "#SBATCH -N 2\nsrun -K conda run -n a python a.py",
        # The program gets it, or does not need it.
        "#SBATCH -N 2\nMASTER_ADDR=$(hostname)\nsrun -K python a.py --address $MASTER_ADDR",
        "#SBATCH -N 2\nMASTER_ADDR=$(hostname)\nexport MASTER_ADDR\nsrun -K python a.py",
        "#SBATCH -N 2\nset -a\nMASTER_ADDR=$(hostname)\nsrun -K python a.py",
        "#SBATCH -N 2\ndeclare -x MASTER_ADDR=$(hostname)\nsrun -K python a.py",
        "#SBATCH -N 2\nMASTER_ADDR=$(hostname)\n. ./settings.sh\nsrun -K python a.py",
        "#SBATCH -N 2\nx=1\nsrun -K bash -c 'read x < file; python a.py $x'",
        "#SBATCH -N 2\nLR=1\nsrun -K bash -c 'python a.py $LR'",
        # On one host, of the first task, or for separate trainings.
        "#SBATCH -N 1 -n 4\n"
        "srun -K bash -c 'export RANK=$SLURM_PROCID MASTER_ADDR=$(hostname); python a.py'",
        "#SBATCH -N 2\nsrun -K bash -c 'if x; then MASTER_ADDR=$HOSTNAME; fi; RANK=1 python a.py'",
        "#SBATCH -N 2\nsrun -K bash -c 'MASTER_PORT=$RANDOM python a.py'",
        "#SBATCH -N 2\n"
        "srun -K bash -c 'torchrun --nnodes=1 --master-port=$((9000 + RANDOM)) a.py $SLURM_NODEID'",
        '#SBATCH -N 2\nsrun -K bash -c "MASTER_ADDR=$HOSTNAME RANK=\\$SLURM_PROCID python a.py"',
        # A rendezvous that ignores it.
        "#SBATCH -N 2\nexport a=$SLURM_JOB_NODELIST\n"
        "srun -K torchrun --nnodes=2 --node-rank=0 --rdzv-backend=c10d --rdzv-endpoint=$head a.py",
        "#SBATCH -N 1\nexport MASTER_ADDR=$SLURM_JOB_NODELIST\nsrun -K python a.py",
        '#SBATCH -N 2\nsrun -K bash -c "accelerate launch --rdzv_backend c10d --num_machines 2 '
        '--machine_rank $SLURM_PROCID a.py"',
        # Launchers that start their ranks on these hosts.
        "#SBATCH -N 2\ndeepspeed --num_nodes 2 --hostfile hosts a.py",
        "#SBATCH -N 2\npython -m scoop --hosts $(srun hostname) a.py",
        # A number that is meant: the whole of the node, or one process with all its GPUs.
        "#SBATCH -N 2 --gpus-per-node=4 -c 8\n"
        "srun -K -c 8 accelerate launch --num_machines 2 --num_processes 2 a.py",
        "#SBATCH -N 2 -n 8 --gpus-per-node=4 --cpus-per-gpu=8\n"
        "export MASTER_PORT=29500\nsrun -K python a.py",
        "#SBATCH --mem=0\nexport MASTER_PORT=29500\npython a.py",
        "#SBATCH -n 4 --gpus-per-node=4 --cpus-per-gpu=8 --gpu-bind=closest\nsrun -n1 python a.py",
        "#SBATCH -n 4 -N 1 --gpus-per-task=1 --cpus-per-gpu=8 --gres-flags=allow-task-sharing\n"
        "srun -K python a.py",
        "#SBATCH -N 2\n"
        "srun -n $((SLURM_NNODES * 8)) -K -c7 --gpus-per-task=1 --gpu-bind=closest python a.py",
    ],
)
def test_lint_no_false_alarm(text):
    assert rules(f"#!/bin/bash\n{text}\n") == []


def test_lint_accepts_conda_in_login_shell():
    text = "#!/bin/bash {}\nconda activate a\npython a.py\n"
    assert rules(text.format("-l")) == rules(text.format("--login")) == []
    assert rules(text.format("-e")) == ["shell-function"]


@pytest.mark.parametrize(
    ("source", "one_gpu"),
    [
        ("import torch\nmodel.cuda()", True),
        ("from torch import nn\nx = nn.Linear(1, 1).to('cuda:0')", True),
        ("import hpctrain\nrun = hpctrain.Session()", True),
        ("import torch, beside\nmodel.cuda()", True),
        ("import torch\nmodel.to(torch.accelerator.current_accelerator())", True),
        ("import torch", False),
        ("import torch\nmodel = torch.nn.DataParallel(model).cuda()", False),
        ("import torch\nmodel = load(x, device_map='auto').cuda()", False),
        ("import torch\nfor i in range(4): model.to(f'cuda:{i}')", False),
        ("import torch\nmodel.cuda(); other.cuda(1)", False),
        ("import torch\nmodel.cuda(); other.to(torch.device('cuda', 1))", False),
        ("import torch, os\nmodel.cuda()\nos.fork()", False),
        ("import torch, hpctrain\nhpctrain.spawn(main)", False),
        ("import torch, lightning\nmodel.cuda()", False),
        ("import torch, subprocess\nmodel.cuda()", False),
        ("import torch\nfrom .model import Net\nNet().cuda()", False),
        ("import torch, several\nmodel.cuda()", False),
        ("import torch\nmodel.cuda() +", False),
    ],
)
def test_lint_finds_idle_gpus_only_if_the_program_shows_one(source, one_gpu, tmp_path):
    (tmp_path / "a.py").write_text(source)
    (tmp_path / "beside.py").write_text("import numpy, beside")
    (tmp_path / "several.py").write_text("from torch.nn.parallel import DistributedDataParallel")
    head = "#!/bin/bash\n#SBATCH -n 1 -c 8 --gpus=4\n"
    assert rules(f"{head}python -u a.py --epochs 3\n", tmp_path) == ["idle-gpus"] * one_gpu
    # In another folder, beside another program, or with a choice of GPUs nothing is certain.
    for body in (
        "cd x\npython a.py",
        "python a.py\nsrun ./b",
        "CUDA_VISIBLE_DEVICES=1 python a.py",
    ):
        assert "idle-gpus" not in rules(f"{head}{body}\n", tmp_path)


def test_lint_names_hpctrain_run_for_idle_gpus_of_a_session(tmp_path):
    (tmp_path / "a.py").write_text("import hpctrain\nhpctrain.Session()\n")
    text = "#!/bin/bash\n#SBATCH -n 1 -c 8 --gpus=4\npython a.py\n"
    (finding,) = lint(text, tmp_path)
    assert finding.fixes[0].startswith("type hpctrain run a.py")


def test_lint_accepts_horovod_that_gets_its_rank_from_mpi(tmp_path):
    (tmp_path / "a.py").write_text("import horovod.torch as hvd\n")
    head = "#!/bin/bash\n#SBATCH -n 4\n"
    assert rules(f"{head}srun -K python a.py\n", tmp_path) == ["horovod-alone"]
    for line in (
        "srun -K -n 1 python a.py",
        "srun -K --mpi=pmix python a.py",
        "module load horovod\nsrun -K python a.py",
        "export SLURM_MPI_TYPE=pmix\nsrun -K python a.py",
        "srun -K hpctrain run a.py",
        "mpirun python a.py",
    ):
        assert rules(f"{head}{line}\n", tmp_path) == []
