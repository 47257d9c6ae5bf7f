"""Ranks of the next attempt, which wait until it begins."""

import json
import os
import secrets
import subprocess
import sys
from dataclasses import asdict

import processes
import pytest

from hpctrain.cluster import env_vars
from hpctrain.cluster.launchers.slurm import SlurmStep
from hpctrain.cluster.world import World
from hpctrain.launch.host_ends import read_ends
from hpctrain.launch.host_start import Plan
from hpctrain.launch.standby import Standby, command_that_waits

SCRIPT = """
import json, multiprocessing, os, sys
main = sys.modules["__main__"]
print(json.dumps([
    sys.argv, sys.path[0], __name__, getattr(main, "__file__", None), os.read(0, 1).decode(),
    __spec__ and __spec__.name, open("/proc/self/oom_score_adj").read(), type(main).__name__,
    sys.stdin.read(), os.environ["LOCAL_RANK"],
]))
print(os.environ["RANK"], file=sys.stderr)
if "fail" in sys.argv:
    raise SystemExit(7)
"""


def run(words, folder, given=b'{"RANK": "5"}\n'):
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "1"}
    return subprocess.run(
        words, input=given, capture_output=True, cwd=folder, env=env, timeout=60, check=False
    )


@pytest.fixture
def program(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "tool.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    "words", [["../train.py", "--lr", "0.1"], ["-m", "tool", "fail"], ["-P", "-m", "json.tool"]]
)
def test_rank_that_waited_runs_its_program_as_python_does(program, words):
    folder = program / "work"
    expected = run([sys.executable, *words], folder, b"")
    waited = run(command_that_waits([sys.executable, *words], ["colorsys", "no_such"]), folder)
    assert waited.stdout == expected.stdout
    assert waited.returncode == expected.returncode
    if words[0] != "-P":
        assert (expected.stderr, waited.stderr) == (b"0\n", b"5\n")


CHILD = """
import multiprocessing, os
from hpctrain.cluster.launchers.ancestors import Process
def show(_):
    print(os.environ["RANK"], Process.current().inherited["RANK"], flush=True)
if __name__ == "__main__":
    for os.environ["RANK"] in os.environ["RANK"], "7":
        multiprocessing.get_context("spawn").Pool(1).map(show, [0])
"""


def test_child_process_has_inherited_what_its_rank_got_as_it_began(tmp_path):
    """Else a child process that opens a second Session would not be refused."""
    (tmp_path / "train.py").write_text(CHILD)
    words = command_that_waits([sys.executable, str(tmp_path / "train.py")], [])
    assert run(words, tmp_path).stdout == b"5 5\n7 5\n"


@pytest.mark.parametrize("given", [b"", b'{"RANK": '], ids=["nothing", "half-a-line"])
def test_rank_that_is_not_needed_does_nothing(program, given):
    words = command_that_waits([sys.executable, str(program / "train.py")], [])
    done = run(words, program, given)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "words", [["bash", "train.sh"], ["python3"], ["python3", "-c", "1"], ["python3", "-u", "a.py"]]
)
def test_programs_that_do_not_wait(words):
    assert command_that_waits(words, []) is None


def standby(folder, *words):
    return Standby.start(["a", "b", "c"], folder, (list(words), dict(os.environ), folder / "exit"))


@pytest.mark.parametrize("hosts", [["a", "b", "c"], ["a", "c"], ["a"]])
def test_begin_of_ranks_that_wait(tmp_path, hosts):
    waiting = standby(tmp_path, "cat")
    assert not waiting.begin(["b", "c"])  # the agents have met on the first host
    assert not waiting.begin(["a", "d"])
    assert waiting.begin(hosts)
    assert json.loads(waiting.rank.stdout.read()) == hosts
    waiting.end()
    waiting.wait()
    assert not waiting.begin(hosts)


@pytest.mark.parametrize("words", [["true"], ["cat"], ["sh", "-c", "trap '' TERM; cat; echo on"]])
def test_end_of_ranks_that_are_not_needed(tmp_path, words):
    waiting = standby(tmp_path, *words)
    waiting.end()
    waiting.wait()
    assert not waiting.begin(["a", "b"])


RANK = """
import os, sys
names = "RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "SLURM_NODEID"
file = os.path.basename(os.environ["HPCTRAIN_EXIT_STATUS_FILE"])
print(*map(os.environ.get, names), file, "fail" in sys.argv)
sys.exit("fail" in sys.argv and os.environ["RANK"] == "2")
"""


@pytest.fixture
def start_agents(tmp_path):
    """Return a function that starts an agent for each of four hosts, whose ranks wait."""
    (tmp_path / "rank.py").write_text(RANK)
    hosts = tuple(f"node{number}" for number in range(1, 5))
    agents = []

    def start(nproc, *arguments):
        words = command_that_waits([sys.executable, str(tmp_path / "rank.py"), *arguments], [])
        secret = secrets.token_hex(16)
        plan = Plan(words, nproc, str(tmp_path), "launch", 1, waits=True)
        for index, host in enumerate(hosts):
            world = World(index, 4, 0, 1, index, 4, hosts)
            own = {
                **env_vars.scrubbed(os.environ),
                **SlurmStep().environ(world, [1] * 4, os.getpid()),
                env_vars.AGENT: json.dumps(asdict(plan)),
                env_vars.MAIN_ADDRESS: "127.0.0.1",
                env_vars.HOSTNAME: host,
                env_vars.SECRET: secret,
            }
            words = [sys.executable, "-m", "hpctrain.launch.agent"]
            pipe = subprocess.PIPE
            agents.append(
                subprocess.Popen(words, env=own, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            )
        return agents

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate()


def ends(agents, hosts):
    """Tell the agents the hosts of their attempt; return exit code and output of each."""
    for agent in agents:
        agent.stdin.write(hosts)
        agent.stdin.close()
        agent.stdin = None
    outputs = [agent.communicate(timeout=processes.PATIENCE) for agent in agents]
    assert not any(error for _, error in outputs), outputs
    return [
        (agent.returncode, sorted(out.splitlines()))
        for agent, (out, _) in zip(agents, outputs, strict=True)
    ]


def test_agents_begin_on_the_hosts_of_the_attempt(start_agents, tmp_path):
    found = ends(start_agents("1,1,2,1"), '["node1", "node3", "node4"]\n')
    assert found == [
        (0, ["0: 0 4 0 0 0 exit-status-0 False"]),
        (0, []),
        (0, ["1: 1 4 1 0 1 exit-status-1 False", "2: 2 4 1 1 1 exit-status-1 False"]),
        (0, ["3: 3 4 2 0 2 exit-status-2 False"]),
    ]
    assert sorted(path.name for path in tmp_path.glob("end-*")) == ["end-0", "end-1", "end-2"]


def test_failed_rank_of_an_attempt_on_other_hosts_is_named(start_agents, tmp_path):
    agents = start_agents("1", "fail")
    found = ends(agents, '["node1", "node3", "node4"]\n')
    assert [code for code, _ in found] == [0, 0, 0, 1]
    end = read_ends(tmp_path, 143, stopped=False)
    assert (end.first.rank, end.first.host, end.ranks) == (2, "node4", 3)


@pytest.mark.parametrize("hosts", ["", '["node1", "nod'], ids=["nothing", "half-a-line"])
def test_agents_that_are_not_needed_end(start_agents, tmp_path, hosts):
    assert ends(start_agents("1"), hosts) == [(0, [])] * 4
    assert not list(tmp_path.glob("end-*"))


def test_agent_ends_with_a_rank_that_waits(start_agents, tmp_path):
    """Then the next attempt is made anew, and does not begin with a rank that is gone."""
    script = str(tmp_path / "rank.py")
    agents = start_agents("1")
    processes.until(lambda: len(processes.having(script)) == 4)
    os.kill(processes.having(script)[0], 9)
    processes.until(lambda: 1 in [agent.poll() for agent in agents])
    assert [agent.poll() for agent in agents].count(None) == 3
