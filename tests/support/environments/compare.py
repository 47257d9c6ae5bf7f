"""Differences between a new capture and a file, as far as hpctrain reads them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from environments.starts import Start
from hpctrain.cluster import job
from hpctrain.cluster.launchers import LAUNCHERS
from hpctrain.cluster.world import World
from hpctrain.errors import HpctrainError

# Variables whose value differs in every capture, but not its form.
VOLATILE = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HPCTRAIN_MAIN_PORT",
    "HPCTRAIN_START",
    "HYDI_CONTROL_FD",
    "I_MPI_HYDRA_UUID",
    "MASTER_PORT",
    "OMPI_FILE_LOCATION",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_orte_jobfam_session_dir",
    "OMPI_MCA_orte_local_daemon_uri",
    "OMPI_MCA_orte_precondition_transports",
    "PALS_APID",
    "PMIX_ID",
    "PMIX_NAMESPACE",
    "PMIX_SERVER_TMPDIR",
    "PMIX_SERVER_URI2",
    "PMIX_SERVER_URI21",
    "PMIX_SERVER_URI3",
    "PMIX_SERVER_URI4",
    "PMIX_SERVER_URI41",
    "PMI_FD",
    "PMI_JOBID",
    "PMI_SHARED_SECRET",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_ID",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_STEP_LAUNCHER_PORT",
    "SLURM_TASK_PID",
    "SUBMITIT_DEBUG_JOB_ID",
    "SUBMITIT_LOCAL_JOB_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
}


def differences(start: Start, kept: Mapping[str, Any], captured: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference of two documents of a start: of the file and a new one."""
    found = _unlike(kept, captured, ("launcher", "how", "layout"))
    if kept["layout"] != captured["layout"]:
        return found
    for rank, (old, new) in enumerate(zip(kept["ranks"], captured["ranks"], strict=True)):
        world = World(**start.world(rank))
        names_asked = names_read(old["env"], world) | names_read(new["env"], world)
        found += [
            f"rank {rank}: {line}"
            for line in (
                *_unlike(old, new, ("world", "argv")),
                *_unlike(_titles(old), _titles(new), ("parents",)),
                *_unlike(_formed(old["env"]), _formed(new["env"]), sorted(names_asked)),
            )
        ]
    return found


def _unlike(
    kept: Mapping[str, Any], captured: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    return [
        f"{name}: {kept.get(name)} and now {captured.get(name)}"
        for name in names
        if kept.get(name) != captured.get(name)
    ]


def _titles(rank: Mapping[str, Any]) -> dict[str, list[str]]:
    return {"parents": [form(title) for title in rank["parents"]]}


def _formed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: form(value) if name in VOLATILE else value for name, value in env.items()}


def form(value: str) -> str:
    """Return a value without the parts that differ by start: numbers, and words of hex digits."""
    return re.sub(r"\b[0-9a-f]{6,}(?:-[0-9a-f]+)*\b|\d+", "#", value)


def names_read(env: Mapping[str, str], world: World) -> set[str]:
    """Return the variables that any launcher, or the allocation, reads in this environment."""
    recorder = Recorder(env)
    with contextlib.suppress(HpctrainError):
        job.detect(recorder)
    for launcher in LAUNCHERS:
        for ask in (
            launcher.matches,
            launcher.claims,
            launcher.key,
            lambda names_asked, one=launcher: one.main(names_asked, world),
        ):
            with contextlib.suppress(HpctrainError, LookupError, ValueError):
                ask(recorder)
        recorder.names_asked.update(*launcher.variables.values())
    return recorder.names_asked


class Recorder(dict[str, str]):
    """An environment that records the names that are read."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        self.names_asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names_asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names_asked.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, and record its name."""
        self.names_asked.add(name)
        return super().get(name, default)
