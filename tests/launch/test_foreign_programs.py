"""Programs that know nothing of hpctrain, under `hpctrain run`: torch, Horovod, shell, modules."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
from pathlib import Path

import launches
import processes
import pytest
from processes import until

RUN = [launches.PYTHON, "-m", "hpctrain", "run"]
NONE_OF_THEM = "none of the 3 ranks has opened a Session or connected to the others"
SERVERS = ["hpctrain.backends.ddp.store_process", "hpctrain.rendezvous.http_store"]


@pytest.fixture
def background():
    """Return a function that starts commands; those that still run at the end are killed."""
    with processes.background() as begin:
        yield begin


@pytest.fixture
def horovod(lacking):
    if importlib.util.find_spec("horovod") is None:
        lacking("horovod", "no module named horovod")


def write(name, text):
    """Write a program to the folder of this test, and return its name."""
    Path(name).write_text(text)
    return name


def printed(output):
    """Return what each rank has printed: a line of JSON."""
    lines = dict(line.split(": ", 1) for line in output.splitlines())
    return [json.loads(lines[str(rank)]) for rank in range(len(lines))]


def servers(mark):
    """Return the modules of the servers of stores, with a text in their environment."""
    found = []
    for pid in processes.having(mark, "environ"):
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found += words[2:3] if words[2:3] in [[server] for server in SERVERS] else []
    return sorted(found)


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


def check_that_nothing_is_left(mark, ports):
    until(lambda: not processes.having(mark, "environ"))
    assert len(ports) == 2
    # A process that ends loses its environ before its sockets.
    until(lambda: not any(map(listening, ports)))


# The gradients are of other data on each rank: the weights are equal only if they are averaged.
DDP = """
import hashlib, json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
place = [dist.get_rank(), dist.get_world_size()]
dist.destroy_process_group()
"""
HOROVOD = """
import hashlib, json, os, sys
import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
place = [hvd.rank(), hvd.size()]
hvd.shutdown()
"""
PRINT_DIGEST = """
assert "hpctrain" not in sys.modules
print(json.dumps({
    "place": place,
    "digest": hashlib.sha256(weights.tobytes()).hexdigest(),
    "argv": sys.argv[1:],
    "ports": [os.environ["MASTER_PORT"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]],
}))
"""


# Ranks that hpctrain starts, and tasks of MPI, each of which `hpctrain run` makes a rank.
STARTS = {
    "ranks": [*RUN, "--nproc-per-node", "3"],
    "tasks": [*RUN, "--nproc-per-node", "3", "--as", "mpi", "--", *RUN],
}
of_each_start = pytest.mark.parametrize(
    "start", ["ranks", pytest.param("tasks", marks=pytest.mark.slow)]
)


def check_training(program, start, tmp_path):
    script = write("train.py", program + PRINT_DIGEST)
    mark = f"training-{os.getpid()}"
    command = [*STARTS[start], script, "--", "x", "--nodes"]
    done = launches.start(command, tmp_path, MARK=mark)
    assert done.returncode == 0, done.stderr
    ranks = printed(done.stdout)
    assert [rank["place"] for rank in ranks] == [[0, 3], [1, 3], [2, 3]]
    assert all(rank["argv"] == ["--", "x", "--nodes"] for rank in ranks)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert "hpctrain: none of the" not in done.stderr
    check_that_nothing_is_left(mark, ranks[0]["ports"])


@of_each_start
def test_script_of_torch_distributed_trains_with_equal_weights(start, tmp_path):
    check_training(DDP, start, tmp_path)


@of_each_start
def test_script_of_horovod_trains_with_equal_weights(start, horovod, tmp_path):
    check_training(HOROVOD, start, tmp_path)


MODULE = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
"""


@pytest.mark.parametrize(
    ("options", "nodes"), [((), [0, 0, 0]), (("--nodes", "2"), [0, 0, 1])], ids=["one", "two"]
)
def test_variables_of_torchrun_and_horovodrun_agree_with_those_of_hpctrain(
    tmp_path, options, nodes
):
    write("shows.py", MODULE)
    layout = "2,1" if options else "3"
    command = [*RUN, *options, "--nproc-per-node", layout, "-m", "shows", "--", "-m"]
    done = launches.start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = printed(done.stdout)
    assert len(ranks) == 3
    for number, rank in enumerate(ranks):
        assert rank["argv"] == ["--", "-m"]
        env, node = rank["env"], nodes[number]
        place = {
            "RANK": number,
            "WORLD_SIZE": 3,
            "LOCAL_RANK": number - nodes.index(node),
            "LOCAL_WORLD_SIZE": nodes.count(node),
        }
        for name, value in place.items():
            assert env[name] == env[f"HPCTRAIN_{name}"] == str(value)
            horovod = "HOROVOD_" + name.replace("WORLD_", "")
            assert env[horovod] == str(value)
        assert env["GROUP_RANK"] == env["HPCTRAIN_NODE_RANK"] == str(node)
        assert env["HOROVOD_CROSS_SIZE"] == str(2 if number != 1 and options else 1)
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == env["MASTER_ADDR"] == "127.0.0.1"
    for name in ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT", "TORCHELASTIC_RUN_ID"):
        assert len({rank["env"][name] for rank in ranks}) == 1
    assert env["MASTER_PORT"] != env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    assert NONE_OF_THEM in done.stderr


def test_program_that_never_connects_has_no_server_and_is_named(background):
    mark = f"alone-{os.getpid()}"
    line = "echo rank $RANK of $WORLD_SIZE; until [ -e go ]; do sleep 0.05; done"
    run = background([*RUN, "--nproc-per-node", "3", "--", "sh", "-c", line], MARK=mark)
    lines = {run.stdout.readline() for _ in range(3)}
    assert lines == {f"{rank}: rank {rank} of 3\n" for rank in range(3)}
    assert servers(mark) == []
    running = processes.having(mark, "environ")
    assert len(running) > 3
    for pid in running:
        with contextlib.suppress(OSError):  # it has ended
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    Path("go").touch()
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, "")
    assert NONE_OF_THEM in err
    until(lambda: not processes.having(mark, "environ"))


# A client of Horovod's store, and one that leaves torch's store before it has an answer.
CONNECTS = """
import http.client, json, os, socket, time
ports = [os.environ["MASTER_PORT"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]]
rank = os.environ["RANK"]
for method, path, body in (("PUT", rank, rank), ("GET", rank, None)):
    connection = http.client.HTTPConnection("127.0.0.1", int(ports[1]), timeout=60)
    connection.request(method, f"/scope/{path}", body)
    answer = connection.getresponse().read().decode()
socket.create_connection(("127.0.0.1", int(ports[0])), timeout=60).close()
print(json.dumps({"answer": answer, "ports": ports}), flush=True)
while "WAIT" in os.environ: time.sleep(0.05)
"""


def test_stores_end_with_kill_9_of_hpctrain_run(background):
    mark = f"stores-{os.getpid()}"
    command = [*RUN, "--nproc-per-node", "3", write("connects.py", CONNECTS)]
    run = background(command, MARK=mark, WAIT="1")
    ranks = printed("".join(run.stdout.readline() for _ in range(3)))
    assert [rank["answer"] for rank in ranks] == ["0", "1", "2"]
    until(lambda: servers(mark) == SERVERS)
    os.kill(run.pid, signal.SIGKILL)
    run.wait(timeout=60)
    check_that_nothing_is_left(mark, ranks[0]["ports"])


@pytest.mark.parametrize("options", [(), ("--nodes", "3")])
def test_program_that_connects_is_not_named(tmp_path, options):
    mark = f"connected-{os.getpid()}"
    per_node = "1" if options else "3"
    command = [*RUN, *options, "--nproc-per-node", per_node, write("connects.py", CONNECTS)]
    done = launches.start(command, tmp_path, MARK=mark)
    assert done.returncode == 0, done.stderr
    assert "hpctrain: none of the" not in done.stderr
    check_that_nothing_is_left(mark, printed(done.stdout)[0]["ports"])
