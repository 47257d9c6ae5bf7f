"""What a launch does for a script because of its source, and what it refuses."""

import socket
import sys

import launches
import pytest

from hpctrain.errors import UsageError
from hpctrain.launch import script_source

RUN = [launches.PYTHON, "-m", "hpctrain", "run", "--nproc-per-node"]
RANK = {
    "HPCTRAIN_LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "3",
    "WORLD_SIZE": "6",
}


@pytest.fixture
def free_port():
    """Return a port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def read(tmp_path):
    """Return a function that writes files, and returns the source of train.py and its project."""

    def read(text, **modules):
        for name, content in {"train": text, **modules}.items():
            (tmp_path / f"{name}.py").write_text(content)
        return script_source.read([sys.executable, "train.py", "--epochs", "2"], str(tmp_path), {})

    return read


PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({!r}, type=int)"


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_script_with_an_option_for_the_local_rank_gets_it(read, option):
    command = [sys.executable, "train.py", "--epochs", "2"]
    with_option = [sys.executable, "train.py", f"{option}=1", "--epochs", "2"]
    assert read(PARSER.format(option)).command(command, RANK) == with_option
    parsed = read("import options", options=PARSER.format(option))
    assert parsed.command(command, RANK) == with_option
    own = [*command, f"{option}=7"]
    assert parsed.command(own, RANK) == own
    assert parsed.command(command, {}) == command


def test_option_of_the_parser_of_another_program_is_not_passed(read):
    source = read(PARSER.format("--epochs") + "\nimport other", other=PARSER.format("--local_rank"))
    assert source.command(["python", "train.py"], RANK) == ["python", "train.py"]


def test_module_gets_the_option_for_the_local_rank_after_its_name(tmp_path):
    (tmp_path / "lab.py").write_text(PARSER.format("--local_rank"))
    command = [sys.executable, "-P", "-m", "lab", "x"]
    source = script_source.read(command, str(tmp_path), {"PYTHONPATH": str(tmp_path)})
    assert source.command(command, RANK) == [*command[:4], "--local_rank=1", "x"]


TUTORIAL = r"""
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = PORT
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    os.write(1, f"{rank} of {size}: {total.item()}\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    START
"""
STARTS = {
    "spawn": "mp.spawn(work, args=(2,), nprocs=2)",
    "Process": "all = [mp.Process(target=work, args=(rank, 2)) for rank in range(2)]\n"
    "    [one.start() for one in all]\n"
    "    [one.join() for one in all]",
}


@pytest.mark.parametrize("start", STARTS)
def test_script_that_starts_its_ranks_is_refused_as_one_of_several(read, start):
    source = read(TUTORIAL.replace("START", STARTS[start]))
    with pytest.raises(UsageError, match=r"train.py, line \d+, starts processes .* of 2 ranks"):
        source.check(2)
    source.check(1)


@pytest.mark.parametrize(
    "more",
    [
        "import hpctrain; hpctrain.Session",
        "import horovod.torch as hvd",
    ],
)
def test_script_that_can_take_its_rank_from_the_launcher_is_not_refused(read, more):
    read(TUTORIAL.replace("START", STARTS["spawn"]) + more).check(2)


TWO_WAYS = """    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), 2)
    else:
        """


@pytest.mark.parametrize("way", [f"{TWO_WAYS}START", f"{TWO_WAYS}main()\ndef main():\n    START"])
def test_script_that_starts_its_ranks_without_a_launcher_only_is_not_refused(read, way):
    text = TUTORIAL.replace("    START", way).replace("START", STARTS["spawn"])
    read(text).check(2)
    always = TUTORIAL.replace("START", STARTS["spawn"]) + "\n    print(os.environ['RANK'])"
    with pytest.raises(UsageError):
        read(always).check(2)


def test_processes_that_are_no_ranks_are_not_refused(read):
    read("import multiprocessing\nmultiprocessing.Process(target=print).start()").check(2)


@pytest.mark.ranks
@pytest.mark.parametrize("assigned", ["'{port}'", "os.environ.get('MASTER_PORT', '1')"])
def test_tutorial_of_torch_trains_under_hpctrain_run(tmp_path, free_port, assigned):
    text = TUTORIAL.replace("START", STARTS["spawn"])
    (tmp_path / "train.py").write_text(
        text.replace("PORT\n", assigned.format(port=free_port) + "\n")
    )
    done = launches.start([*RUN, "1", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 3.0", "1 of 2: 3.0"]


PORT = """
import os, sys, torch, torch.distributed as dist
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
print(total.item())
"""


@pytest.mark.ranks
def test_ranks_of_a_script_that_sets_the_port_itself_connect(tmp_path, free_port):
    (tmp_path / "train.py").write_text(PORT)
    done = launches.start([*RUN, "3", "train.py", str(free_port)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: 6.0", "1: 6.0", "2: 6.0"]
    assert "trained alone" not in done.stderr


FABRIC = "from lightning_fabric import Fabric\nfabric = Fabric(accelerator='cpu', devices=2)\n"


def test_fabric_that_is_not_launched_by_the_script_gets_what_fabric_run_sets(read):
    more = read(FABRIC).environ(RANK, None)
    assert more == {"LT_CLI_USED": "1", "LT_DEVICES": "2", "LT_NUM_NODES": "3"}
    assert read(FABRIC + "fabric.launch()").environ(RANK, None) == {}
    assert read("class Fabric: pass\nFabric()").environ(RANK, None) == {}


OWN_STORE = """
import os, socket, sys, time
address, port = ("127.0.0.1", int(sys.argv[1]))
if os.environ["RANK"] == "0":
    with socket.create_server((address, port)) as server:
        other = server.accept()[0]
else:
    while True:
        try:
            other = socket.create_connection((address, port))
            break
        except OSError:
            time.sleep(0.05)
time.sleep(2)  # the connection can have been seen
"""


def test_ranks_that_connect_in_a_way_of_their_own_are_not_said_to_train_alone(tmp_path, free_port):
    (tmp_path / "train.py").write_text(OWN_STORE)
    done = launches.start([*RUN, "2", "train.py", str(free_port)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained alone" not in done.stderr


@pytest.mark.ranks
def test_short_program_that_opens_a_process_group_is_not_said_to_train_alone(tmp_path):
    text = PORT.replace(
        'os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]', ""
    )
    text = text.replace(
        '"gloo"',
        f'"gloo", init_method="file://{tmp_path}/store", '
        'rank=int(os.environ["RANK"]), world_size=2',
    )
    (tmp_path / "train.py").write_text(text)
    done = launches.start([*RUN, "2", "train.py"], tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0: 3.0", "1: 3.0"], done.stderr
    assert "trained alone" not in done.stderr


@pytest.mark.parametrize("style", ["slurm", "torchrun", "mpi", "horovod"])
def test_programs_that_train_alone_are_told_so_also_with_the_variables_of_a_launcher(
    tmp_path, style
):
    (tmp_path / "train.py").write_text("print('trained')")
    done = launches.start([*RUN, "2", "--as", style, "train.py"], tmp_path)
    assert done.returncode == 0
    assert "it seems that each rank has trained alone" in done.stderr
    assert ("hpctrain run without --as" in done.stderr) == (style != "torchrun")


def test_help_of_a_script_is_no_training(tmp_path):
    (tmp_path / "train.py").write_text("print('usage')")
    done = launches.start([*RUN, "2", "train.py", "--help"], tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0: usage", "1: usage"]
    assert "trained alone" not in done.stderr


def test_each_rank_has_a_file_for_its_error_as_under_torchrun(tmp_path):
    text = "import os\nprint(os.environ['TORCHELASTIC_ERROR_FILE'])"
    (tmp_path / "train.py").write_text(text)
    done = launches.start([*RUN, "2", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len({line.partition(": ")[2] for line in done.stdout.splitlines()}) == 2
