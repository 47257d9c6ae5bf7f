"""Horovod over a real MPI, and over an MPI that is not the one that started the ranks."""

import shutil
from pathlib import Path

import launches
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROGRAM = str(Path(__file__).with_name("over_mpi.py"))
SOME_LAYERS = str(Path(__file__).with_name("adasum_of_some_layers.py"))


@pytest.fixture
def mpirun(horovod, lacking):
    """Return the commands of Open MPI, with which the tests build Horovod, and of MPICH."""
    for part, program in (("openmpi", "mpirun.openmpi"), ("mpich", "mpiexec.hydra")):
        if shutil.which(program) is None:
            lacking(part, f"{program} is not there")
    return {
        "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
        "mpich": ["mpiexec.hydra"],
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_adasum_over_mpi_equals_horovod_baseline(mpirun, ranks):
    command = [*mpirun["openmpi"], "-np", str(ranks), launches.PYTHON, PROGRAM]
    done = launches.start(command, ".", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    # mpirun forwards the lines of the ranks in any order.
    (line,) = [one for one in done.stdout.splitlines() if not one.startswith("second: ")]
    transport, difference = line.split()
    assert transport == "mpi"
    assert float(difference) < 1e-12
    assert done.stdout.count("a second Session over Horovod and MPI in one process") == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_adasum_of_ranks_that_use_different_layers(mpirun, ranks):
    command = [*mpirun["openmpi"], "-np", str(ranks), launches.PYTHON, SOME_LAYERS]
    done = launches.start(command, ".", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    differences = [float(line.split()[2]) for line in done.stdout.splitlines()]
    assert len(differences) == ranks
    assert max(differences) < 1e-12


def test_horovod_over_another_mpi_than_the_launchers_is_refused(mpirun):
    command = [*mpirun["mpich"], "-np", "3", launches.PYTHON, str(launches.EXAMPLE)]
    done = launches.start([*command, "--backend", "horovod", "--max-steps", "1"], ".")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "horovod over mpi has rank 0 of 1, hydra has rank 2 of 3" in done.stderr
    assert "export HOROVOD_CONTROLLER=gloo" in done.stderr


def test_horovod_over_gloo_under_mpich(mpirun):
    command = [*mpirun["mpich"], "-np", "2", launches.PYTHON, str(launches.EXAMPLE)]
    arguments = ["--backend", "horovod", "--max-steps", "2", "--run-dir", "run"]
    done = launches.start([*command, *arguments], ".", HOROVOD_CONTROLLER="gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stderr
    assert "horovod over gloo" in done.stderr
