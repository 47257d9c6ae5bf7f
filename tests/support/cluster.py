"""A real Slurm of four nodes and a login host on one Debian or Ubuntu machine, for the tests.

    apt-get install slurm-wlm munge iproute2 openssh-server
    python tests/support/cluster.py start
    python tests/support/cluster.py run -- srun -N4 hostname
    python tests/support/cluster.py stop

Each host is a set of network, UTS and mount namespaces that an idle process holds open: it has
its own host name, addresses and /etc/hosts, and shares all other files with the machine, as on a
cluster with a shared file system. The hosts' cables end in bridges inside one more network
namespace, so that the machine's own network stays as it is. It needs root, and no systemd.

Every node has what makes addresses hard to choose on real ones: a slow second network, a docker0
with the same address everywhere, and its own name at 127.0.1.1.

$HPCTRAIN_TEST_SLURM chooses another version of Slurm, from `slurm_roots.SUITES`.

Where the package openssh-server is installed, every node has an sshd of its own, with keys that
last as long as the cluster. The `ssh` in `Cluster.ssh_folder` knows them; nothing is in ~/.ssh.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import slurm_roots

# The prefix of the directories of all clusters.
NAME = "hpctrain-slurm"
NODES = ("node1", "node2", "node3", "node4")
SWITCH = "switch"
ADDRESSES = {"login": 100} | {node: number for number, node in enumerate(NODES, 1)}
CLUSTER_NETWORK = "10.77.0"
SLOW_NETWORK = "192.168.77"
# Of both networks: routes that are more specific than those of the interfaces.
_HALVES = [f"{net}.{first}/25" for net in (CLUSTER_NETWORK, SLOW_NETWORK) for first in (0, 128)]
DOCKER_ADDRESS = "172.17.0.1/16"
# The prefix of IPv6 addresses by interface; the host's number follows.
IPV6_NETWORKS = {"eth0": "fd77::", "eth1": "fd77:0:0:1::"}
# What a cable is called at the host, and the bridge at its other end; the one that only keeps
# docker0 up, as a running container would, ends in none.
CABLES = {"eth0": "fast", "eth1": "slow", "veth0": None}

GPUS_PER_NODE = 4
PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip", "unshare", "nsenter", "setsid")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

UNSHARE = ("unshare", "--net", "--uts", "--mount")
# Prints the process id that `sleep` will have and lets go of the pipe once the host is complete.
HOLD = (
    'hostname "$1" && mount --bind "$2" /etc/hosts && echo $$'
    " && exec sleep infinity >/dev/null 2>&1"
)
# The same in a root with another version of Slurm (slurm_roots.py), with the folders of the machine
# that hold no system.
HOLD_IN_ROOT = (
    'hostname "$1" && mount --make-rprivate / && mount --bind "$3" "$3" && cd "$3"'
    ' && mount --bind "$2" etc/hosts && for name in $4; do'
    " case $name in dev|proc|run|sys) how=--rbind;; *) how=--bind;; esac;"
    ' mount $how "/$name" "$name" || exit; done'
    " && pivot_root . . && umount --lazy . && echo $$ && exec sleep infinity >/dev/null 2>&1"
)
# setns(2) into a mount namespace moves the process to its root: hence the way back.
ENTER = (
    'directory=$(pwd) && exec nsenter --target "$0" --net --uts --mount'
    ' env --chdir "$directory" "$@"'
)
PROBE = (
    "ip link add name probe type bridge && ip link add name near type veth peer name far"
    " && hostname probe && mount --bind /etc/hosts /etc/hosts"
)

SLURM_CONF = """\
ClusterName=hpctrain
SlurmctldHost=login({login})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
StateSaveLocation={directory}/login/state
SlurmctldPidFile={directory}/login/slurmctld.pid
SlurmctldLogFile={directory}/login/slurmctld.log
SlurmdSpoolDir={directory}/%n/spool
SlurmdPidFile={directory}/%n/slurmd.pid
SlurmdLogFile={directory}/%n/slurmd.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
# A task that leaves in the very moment of its KILL can leave its slurmstepd waiting for its own
# watch, and without the program below Slurm then takes the whole node away. Seen with 22.05.8.
UnkillableStepTimeout=10
UnkillableStepProgram={directory}/give-up
SlurmdTimeout=10
# Nodes larger than the machine, so that several tasks with several CPUs fit on each.
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=patient Nodes=ALL PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""
SSHD_CONFIG = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
# What horovodrun opens at once to one host, and more.
MaxStartups 100
"""
SSH_CONFIG = """\
Host *
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""
NODE_LINE = (
    "NodeName={node} NodeHostname={node} NodeAddr={address} Sockets=1 CoresPerSocket=8"
    f" ThreadsPerCore=1 RealMemory=64000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
)


_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "REQUEUED", "COMPLETING")


class ClusterError(RuntimeError):
    """The cluster could not be started, entered or stopped."""


def available() -> str:
    """Say in one line why no cluster can run here and what to type; "" when one can."""
    if os.geteuid() != 0:
        return "the test cluster makes network namespaces, which takes root: type sudo first"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"no {', '.join(missing)} here: type apt-get install slurm-wlm munge iproute2"
    probe = _capture([*UNSHARE, "sh", "-c", PROBE], {"PATH": _path()})
    if probe.returncode:
        reason = " ".join(probe.stderr.split())
        return (
            f"no namespaces with bridges and veth links here ({reason}): on the host type"
            " modprobe -a bridge veth, and in Docker give `docker run` the option --privileged"
        )
    return ""


def address(host: str) -> str:
    """Return a host's address in the cluster network, the one that its name resolves to."""
    return f"{CLUSTER_NETWORK}.{ADDRESSES[host]}"


def address6(host: str, interface: str) -> str:
    """Return the IPv6 address that `Cluster.ipv6` gives to an interface of a host."""
    return f"{IPV6_NETWORKS[interface]}{ADDRESSES[host]}"


def has_ipv6() -> bool:
    """Say whether this kernel has IPv6."""
    return Path("/proc/net/if_inet6").exists()


def hosts_text(host: str) -> str:
    """Return a hosts file as Debian's installer and a site's administrator leave it together."""
    names = [f"{address(other)} {other}" for other in ADDRESSES if other != host]
    return "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {host}", *names, "::1 localhost", ""])


class Cluster:
    """The one cluster of its directory, whichever process started it.

    Args:
        name: of the directory; clusters of other names do not disturb each other.
    """

    hosts: tuple[str, ...] = NODES

    def __init__(self, name: str = NAME) -> None:
        # A directory of its own below the one that the user names, so that nothing else can be
        # in it when it is removed.
        self.directory = _parent() / name
        self.configuration = self.directory / "slurm.conf"
        # Of Slurm, where it is not the machine's own.
        self.version = os.environ.get("HPCTRAIN_TEST_SLURM", "")
        # Holds an `ssh` that can log in to the nodes: to be put in front of PATH.
        self.ssh_folder = self.directory / "ssh" / "bin"

    def start(self) -> None:
        """Remove the remains of an earlier run; return when all nodes are idle."""
        if reason := available():
            raise ClusterError(reason)
        with self._locked():
            self._remove()
            try:
                self._write_files()
                for host in (SWITCH, *ADDRESSES):
                    self._hold(host)
                self._connect()
                self._start_daemons()
                self._wait_until_idle()
            except BaseException:
                self._remove()
                raise

    def stop(self) -> None:
        """Kill every process on the hosts, which removes the hosts, and remove the files."""
        with self._locked():
            self._remove()

    def command(self, argv: Sequence[str], host: str = "login") -> list[str]:
        """Return the command line that runs `argv` on a host, in the caller's directory."""
        return ["sh", "-c", ENTER, str(self._holder(host)), *argv]

    def environ(self) -> dict[str, str]:
        """Return the caller's environment with this Slurm instead of the caller's."""
        foreign = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "PMI")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.configuration), "PATH": _path()}

    def run(
        self, argv: Sequence[str], host: str = "login", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, with options as for `subprocess.run`."""
        defaults: dict[str, Any] = {"text": True, "timeout": 120, "env": self.environ()}
        if not {"stdout", "stderr"} & options.keys():
            defaults["capture_output"] = True
        completed: subprocess.CompletedProcess[str] = subprocess.run(
            self.command(argv, host), check=options.pop("check", False), **defaults | options
        )
        return completed

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job, by name."""
        shown = self.run(["scontrol", "show", "job", "--oneliner", number], check=True).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def batch(
        self, arguments: Sequence[str], seconds: float = 600.0, **options: Any
    ) -> tuple[str, int]:
        """Run a job by sbatch to its end; return its number and exit code.

        `sbatch --wait` looks after 2, 8, 32 seconds, and so wastes most of a minute.
        """
        done = self.run(["sbatch", "--parsable", *arguments], **options)
        if done.returncode:
            raise ClusterError(done.stderr)
        return self.ended(done.stdout.strip(), seconds)

    def ended(self, number: str, seconds: float = 600.0) -> tuple[str, int]:
        """Wait for a job's end; return its number and exit code."""
        end = time.monotonic() + seconds
        while (facts := self.job(number))["JobState"] in _UNDER_WAY:
            if time.monotonic() > end:
                raise ClusterError(f"job {number} is {facts['JobState']} after {seconds:.0f} s")
            time.sleep(0.2)
        code, _, cause = facts["ExitCode"].partition(":")
        return number, int(code) or (128 + int(cause) if int(cause) else 0)

    def cut(self, host: str) -> None:
        """Disconnect a host's networks; its processes run on, and Slurm detects it after 30 s."""
        self._set_cables(host, "down")

    def mend(self, host: str) -> None:
        """Connect them again; the host is idle within a minute, or after `scontrol reconfigure`."""
        self._set_cables(host, "up")

    def mute(self, host: str) -> None:
        """Let a host receive and not send: a half-open connection for its peers."""
        self._ip(host, [f"route add blackhole {half}" for half in _HALVES])

    def unmute(self, host: str) -> None:
        """Let it send again."""
        self._ip(host, [f"route delete blackhole {half}" for half in _HALVES])

    def power_off(self, host: str, silently: bool = False) -> None:
        """Power a host off: it runs no process and does not answer.

        Args:
            host: which one.
            silently: its peers are not told that their connections are gone, as after a failure
                of its power supply or kernel; else they are, as after a shutdown.
        """
        if silently:
            self.cut(host)
        self.crash(host)
        if not silently:
            self.cut(host)

    def crash(self, host: str) -> None:
        """Kill all processes on a host, slurmd and its tasks; its kernel and network stay up."""
        self._kill({os.readlink(f"/proc/{self._holder(host)}/ns/net")}, {self._holder(host)})

    def power_on(self, host: str) -> None:
        """Power a lost host on; it is idle within a minute, or after `state=resume`."""
        self.mend(host)
        self._start_node(host)

    def clear(self) -> None:
        """Cancel all jobs and return when all nodes are idle."""
        self.run(["scancel", "--user=root"])
        # Without `scontrol reconfigure`: Slurm would lose the message of a step that ends then,
        # and get it again only after a minute.
        self._wait_until_idle(90)

    @contextlib.contextmanager
    def hosts_file(self, host: str, text: str) -> Iterator[None]:
        """Give one host another /etc/hosts for a while."""
        file = self.directory / host / "hosts"
        # Written, not replaced: the host has this file mounted.
        file.write_text(text)
        try:
            yield
        finally:
            file.write_text(hosts_text(host))

    def state(self, host: str) -> str:
        """Return a node's state in sinfo's words: idle, mixed, allocated, down*, …"""
        return self._states().get(host, "unknown")

    @contextlib.contextmanager
    def ipv6(self, host: str, interface: str) -> Iterator[None]:
        """Give an interface an IPv6 address for a while; eth1 then has no other one.

        eth0 keeps what it has: Slurm talks over it.
        """
        # Usable at once (nodad): no other host can have it.
        news = [f"address add {address6(host, interface)}/64 dev {interface} nodad"]
        olds = [f"address del {address6(host, interface)}/64 dev {interface}"]
        if interface == "eth1":
            slow = f"{SLOW_NETWORK}.{ADDRESSES[host]}/24 dev eth1"
            news.append(f"address del {slow}")
            olds.append(f"address add {slow}")
        self._ip(host, news)
        try:
            yield
        finally:
            self._ip(host, olds)

    def _states(self) -> dict[str, str]:
        listing = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout
        return dict(line.split() for line in listing.splitlines())

    @contextlib.contextmanager
    def _locked(self, timeout: float = 120) -> Iterator[None]:
        """Let one process at a time start or stop; lock the parent, so that no file remains."""
        descriptor = os.open(self.directory.parent, os.O_RDONLY)
        try:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ClusterError(
                            f"another process has been starting or stopping {self.directory}"
                            f" for {timeout:.0f} s"
                        ) from None
                    time.sleep(0.1)
            yield
        finally:
            os.close(descriptor)

    def _remove(self, timeout: float = 20) -> None:
        """Kill the processes in the hosts' network namespaces, steps included; remove the files.

        A host's holder may be dead while its slurmd lives, so any process that has this
        cluster's SLURM_CONF gives its namespace away, and then takes all others in it along.
        """
        networks = {network for process, network in _networks() if self._started(process)}
        networks.discard(os.readlink("/proc/self/ns/net"))
        self._kill(networks, set(), timeout)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)

    def _kill(self, networks: set[str], spared: set[int], timeout: float = 20) -> None:
        """Kill the processes in network namespaces, except those with the spared ids."""

        def left() -> list[int]:
            inside = [int(process.name) for process, network in _networks() if network in networks]
            return [pid for pid in inside if pid not in spared]

        deadline = time.monotonic() + timeout
        while running := left():
            if time.monotonic() > deadline:
                raise ClusterError(f"these processes survive SIGKILL: {running}")
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _write_files(self) -> None:
        for folder in ("", "munge", SWITCH, "login/state", *(f"{node}/spool" for node in NODES)):
            path = self.directory / folder
            path.mkdir(parents=True)
            path.chmod(0o755)
        key = self.directory / "munge" / "key-file"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        gpus = self.directory / "gpu"
        for number in range(GPUS_PER_NODE):
            # Like /dev/null: Slurm counts it, and opening it is harmless.
            os.mknod(f"{gpus}{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        nodes = [NODE_LINE.format(node=node, address=address(node)) for node in NODES]
        self.configuration.write_text(
            SLURM_CONF.format(
                directory=self.directory, login=address("login"), nodes="\n".join(nodes)
            )
        )
        (self.directory / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={gpus}[0-{GPUS_PER_NODE - 1}]\n"
        )
        give_up = self.directory / "give-up"
        give_up.write_text("#!/bin/sh\nkill -KILL $PPID\n")
        give_up.chmod(0o755)
        # Nothing here uses cgroups; the plugin for the second version would want systemd.
        plugin = "disabled" if self.version else "cgroup/v1"
        (self.directory / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        for host in (SWITCH, *ADDRESSES):
            (self.directory / host / "hosts").write_text(hosts_text(host))
        if shutil.which("sshd", path=_path()):
            self._write_ssh_files()

    def _write_ssh_files(self) -> None:
        """Make the keys, and an `ssh` that uses them."""
        folder = self.ssh_folder.parent
        self.ssh_folder.mkdir(parents=True)
        for name in ("host", "user"):
            new = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            made = _capture(new, self.environ())
            if made.returncode:
                raise ClusterError(f"ssh-keygen failed: {made.stderr.strip()}")
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        # The folder for sshd's unprivileged process; Debian's service makes it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        ssh = self.ssh_folder / "ssh"
        real = shutil.which("ssh", path=_path())
        ssh.write_text(f'#!/bin/sh\nexec {real} -F {folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def _hold(self, host: str) -> None:
        """Make the host's namespaces and an orphan that holds them until it is killed."""
        hosts = str(self.directory / host / "hosts")
        hold = ["sh", "-c", HOLD, "sh", host, hosts]
        if self.version:
            root, folders = slurm_roots.root(self.version), " ".join(slurm_roots.shared())
            hold = ["sh", "-c", HOLD_IN_ROOT, "sh", host, hosts, str(root), folders]
        made = _capture(["setsid", "--fork", *UNSHARE, *hold], self.environ())
        if not made.stdout:
            raise ClusterError(f"cannot make the host {host}: {made.stderr.strip()}")
        (self.directory / host / "holder").write_text(made.stdout)

    def _holder(self, host: str) -> int:
        """Return the process id of a host's holder, if that is still the process it was."""
        pid = _read(self.directory / host / "holder").decode().strip()
        if pid and self._started(Path("/proc", pid)):
            return int(pid)
        raise ClusterError(
            f"no host {host} in {self.directory}: type python tests/support/cluster.py start"
        )

    def _started(self, process: Path) -> bool:
        """Say whether a process was started for this cluster, by the Slurm that it talks to."""
        marker = f"SLURM_CONF={self.configuration}".encode()
        return marker in _read(process / "environ").split(b"\0")

    def _connect(self) -> None:
        """Give every host its interfaces, cabled to the bridges of the switch."""
        bridges = [bridge for bridge in CABLES.values() if bridge]
        switch = [f"link add name {bridge} up type bridge" for bridge in bridges]
        for host in ADDRESSES:
            for cable, bridge in CABLES.items():
                end = f"{host}-{cable}"
                peer = f"peer name {cable} netns {self._holder(host)}"
                master = f"master {bridge}" if bridge else ""
                switch += [f"link add name {end} type veth {peer}", f"link set {end} up {master}"]
        self._ip(SWITCH, switch)
        for host, number in ADDRESSES.items():
            self._ip(
                host,
                [
                    "link set lo up",
                    f"address add {CLUSTER_NETWORK}.{number}/24 dev eth0",
                    f"address add {SLOW_NETWORK}.{number}/24 dev eth1",
                    "link add name docker0 up type bridge",
                    f"address add {DOCKER_ADDRESS} dev docker0",
                    "link set eth0 up",
                    "link set eth1 up",
                    "link set veth0 up master docker0",
                ],
            )
            # A kernel without this queue leaves the second network as fast as the first.
            limit = ["rate", "100mbit", "burst", "64kb", "latency", "50ms"]
            self.run(["tc", "qdisc", "add", "dev", "eth1", "root", "tbf", *limit], host)

    def _ip(self, host: str, lines: Sequence[str]) -> None:
        done = self.run(["ip", "-batch", "-"], host, input="\n".join(lines) + "\n", timeout=20)
        if done.returncode:
            raise ClusterError(f"ip failed on {host}: {done.stderr.strip()}")

    def _set_cables(self, host: str, state: str) -> None:
        self._ip(SWITCH, [f"link set {host}-{cable} {state}" for cable in ("eth0", "eth1")])

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        munged = ["munged", *(f"--{file}={munge / file}" for file in files)]
        self._daemon("login", munged, munge / "log-file")

    def _start_daemons(self) -> None:
        self._start_munge()
        self._daemon("login", ["slurmctld"], self.directory / "login" / "slurmctld.log")
        for node in NODES:
            self._start_node(node)

    def _start_node(self, node: str) -> None:
        self._daemon(node, ["slurmd"], self.directory / node / "slurmd.log")
        sshd = shutil.which("sshd", path=_path())
        if sshd:  # sshd must be started by its full path
            configuration = self.ssh_folder.parent / "sshd_config"
            log = self.directory / node / "sshd.log"
            self._daemon(node, [sshd, "-f", str(configuration), "-E", str(log)], log)

    def _daemon(self, host: str, argv: Sequence[str], log: Path) -> None:
        """Start a program that goes to the background by itself once it is set up."""
        with log.with_suffix(".out").open("w") as output:
            # To a file: the daemon would hold a pipe open long after its parent is gone.
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output}
            try:
                started = self.run(argv, host, **streams, stderr=output, timeout=30)
                failure = f"left with {started.returncode}" if started.returncode else ""
            except subprocess.TimeoutExpired as error:
                failure = f"was not ready after {error.timeout:.0f} s"
        if failure:
            tails = _tail(Path(output.name)) + _tail(log)
            raise ClusterError(f"{argv[0]} on {host} {failure}\n{tails}")

    def _wait_until_idle(self, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while (states := self._states()) != dict.fromkeys(NODES, "idle"):
            if time.monotonic() > deadline:
                late = [node for node in NODES if states.get(node) != "idle"]
                logs = [self.directory / node / "slurmd.log" for node in late]
                logs.append(self.directory / "login" / "slurmctld.log")
                raise ClusterError(
                    f"not idle after {timeout:.0f} s: {', '.join(late)}\n"
                    + "".join(_tail(log) for log in logs)
                )
            time.sleep(0.1)


def _parent() -> Path:
    """Return the folder of all clusters: /run, because munged needs one where only root writes."""
    return Path(os.environ.get("HPCTRAIN_TEST_CLUSTER", "/run"))


def _capture(argv: Sequence[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(argv, timeout=20, check=False, env=environ, **streams)


def _networks() -> Iterator[tuple[Path, str]]:
    """Yield the machine's running processes with the network namespace of each."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield process, os.readlink(process / "ns/net")


def _read(path: Path) -> bytes:
    """Read a file of a process that may be gone by now."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _tail(log: Path, lines: int = 15) -> str:
    text = "\n".join(_read(log).decode(errors="replace").splitlines()[-lines:])
    return f"--- {log}\n{text}\n"


def _path() -> str:
    """Return the caller's PATH with the directories of the daemons, which may be missing there."""
    return os.pathsep.join(filter(None, [os.environ.get("PATH"), SYSTEM_PATH]))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A real Slurm of four nodes on this machine.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("start", help="start it anew; returns when all nodes are idle")
    actions.add_parser("stop", help="stop all clusters and leave nothing behind")
    actions.add_parser("available", help="print why no cluster can run here; 1 if none can")
    actions.add_parser("status", help="print the nodes' states; 1 unless there is a cluster")
    run = actions.add_parser("run", help="run a command on one of the hosts")
    run.add_argument("--name", default=NAME, help="of the cluster (default: %(default)s)")
    run.add_argument("--host", default="login", choices=tuple(ADDRESSES))
    run.add_argument("argv", nargs="+", metavar="COMMAND", help="after --")
    options = parser.parse_args()
    if options.action == "available":
        reason = available()
        print(reason)
        return bool(reason)
    cluster = Cluster(getattr(options, "name", NAME))
    try:
        if options.action == "start":
            cluster.start()
        elif options.action == "stop":
            for directory in {cluster.directory, *_parent().glob(f"{NAME}*")}:
                Cluster(directory.name).stop()
        elif options.action == "run":
            os.execvpe("sh", cluster.command(options.argv, options.host), cluster.environ())
        else:
            for node in cluster.hosts:
                print(node, cluster.state(node))
    except ClusterError as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
