"""The cluster of cluster.py with Slurm's accounting: slurmdbd and MariaDB.

    apt-get install slurmdbd mariadb-server-core mariadb-client-core

A separate cluster, in another folder and other namespaces. The database listens only on the
loopback interface of the login host, and is removed with the cluster.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from cluster import NAME, SYSTEM_PATH, Cluster, ClusterError, available

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
# Slurm removes a job from its memory after these seconds, at its next check for such jobs.
MIN_JOB_AGE = 2

# The "password" is the socket of munged.
SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoragePass={directory}/munge/socket
AccountingStorageEnforce=associations,limits,qos
MinJobAge={age}
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
DbdHost=login
SlurmUser=root
LogFile={directory}/login/slurmdbd.log
PidFile={directory}/login/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
StorageLoc=slurm
"""
MARIADB = (
    "--no-defaults", "--user=root", "--bind-address=127.0.0.1", "--skip-grant-tables",
    "--innodb-buffer-pool-size=32M",
)  # fmt: skip


def missing() -> str:
    """Return in one line why no accounting can run here; "" if it can."""
    absent = [one for one in PROGRAMS if shutil.which(one, path=SYSTEM_PATH) is None]
    if absent:
        packages = "slurmdbd mariadb-server-core mariadb-client-core"
        return f"no {', '.join(absent)} here: type apt-get install {packages}"
    return available()


class AccountedCluster(Cluster):
    """A cluster with accounting: root has the accounts root and physics."""

    def __init__(self) -> None:
        super().__init__(f"{NAME}-accounting")

    def _write_files(self) -> None:
        super()._write_files()
        with self.configuration.open("a") as file:
            file.write(SLURM_CONF.format(directory=self.directory, age=MIN_JOB_AGE))
        slurmdbd = self.directory / "slurmdbd.conf"
        slurmdbd.touch(mode=0o600)  # slurmdbd refuses a file that others can read
        slurmdbd.write_text(SLURMDBD_CONF.format(directory=self.directory))

    def _start_munge(self) -> None:
        super()._start_munge()
        data = self.directory / "mysql"
        # With the machine's own files, also where the hosts have a root with another Slurm: tried,
        # slurmdbd 24.11 does not start with MariaDB 11.8 and these options.
        inside = ["nsenter", "--target", str(self._holder("login")), "--net"]
        install = ["mariadb-install-db", *MARIADB[:2], f"--datadir={data}", "--skip-test-db"]
        env = self.environ()
        done = subprocess.run([*inside, *install], env=env, capture_output=True, timeout=60)
        if done.returncode:
            raise ClusterError(f"mariadb-install-db failed: {done.stdout}{done.stderr}")
        files = [f"--{one}={data}/{one}" for one in ("socket", "pid-file", "log-error")]
        # It stays in the foreground, and ends with the other processes of the host.
        subprocess.Popen(
            [*inside, "mariadbd", *MARIADB, f"--datadir={data}", *files], env=env,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        ready = ["mariadb", "--no-defaults", f"--socket={data}/socket", "-e", "select 1"]
        self._until(lambda: subprocess.run([*inside, *ready], env=env, capture_output=True))
        self._daemon("login", ["slurmdbd"], self.directory / "login" / "slurmdbd.log")
        self._until(lambda: self.run(["sacctmgr", "--noheader", "show", "cluster"]))
        for words in (
            ("cluster", "hpctrain"),
            ("account", "physics"),
            ("user", "root", "account=physics"),
        ):
            added = self.run(["sacctmgr", "--immediate", "add", *words])
            if added.returncode:
                raise ClusterError(f"sacctmgr add {words}: {added.stdout}{added.stderr}")

    def _until(
        self, ask: Callable[[], subprocess.CompletedProcess[Any]], timeout: float = 60
    ) -> None:
        """Wait until a daemon answers."""
        deadline = time.monotonic() + timeout
        while (done := ask()).returncode:
            if time.monotonic() > deadline:
                raise ClusterError(f"{done.args}: {done.stderr}")
            time.sleep(0.2)
