"""What the ranks of a run have used, as they recorded it in timings.jsonl, and what is enough."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.texts import printable
from hpctrain.rundir import RunDirectory
from hpctrain.rundir.effective_time import EffectiveTime

__all__ = ["Used", "edge", "enough", "lines", "measure", "options_text", "used_so_far"]

# What the next job should ask for more than this one has used.
_MORE = 1.25
_LEAST_SECONDS = 600
_GB = 1 << 30


@dataclass(frozen=True, slots=True)
class Used:
    """What the ranks of the last start have used.

    Attributes:
        hosts: host of each rank.
        memory: most bytes of each rank, with its loader processes.
        cores: mean number of cores at work for a rank, and the most of a rank in about half a
            minute; None if they are not known.
        gpu_memory: most bytes of a rank's GPU; 0 without one.
        gpu_use: mean share of time in which the GPUs had work, 0 to 1; None if nothing showed it.
        data_wait: share of the time of the steps in which the mean rank waited for data; None if
            it is not known.
    """

    hosts: Sequence[str]
    memory: Sequence[float]
    cores: tuple[float, float] | None
    gpu_memory: float
    gpu_use: float | None
    data_wait: float | None

    @property
    def on_a_host(self) -> float:
        """Most bytes of all ranks of one host."""
        totals: Counter[str] = Counter()
        for host, size in zip(self.hosts, self.memory, strict=True):
            totals[host] += math.ceil(size)
        return max(totals.values())

    def as_json(self) -> dict[str, Any]:
        """Return the entries of `hpctrain status --used --json`."""
        mean, most = self.cores or (None, None)
        return {
            "memory_of_ranks": list(self.memory),
            "memory_of_a_host": self.on_a_host,
            "cores_of_a_rank": mean and round(mean, 3),
            "most_cores_of_a_rank": most and round(most, 3),
            "gpu_memory": self.gpu_memory or None,
            "gpu_use": self.gpu_use and round(self.gpu_use, 4),
            "data_wait": self.data_wait and round(self.data_wait, 4),
        }


class _Totals:
    """Totals of the lines of one start; a file may be too long to keep them.

    Args:
        hosts: host of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts, self.size = hosts, len(hosts)
        self._memory = [0.0] * self.size
        self._gpu_memory = self._most_cores = 0.0
        self._cores: list[float] = []  # means of lines
        self._gpu_use: list[float] = []
        self._waited = self._seconds = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            LookupError, TypeError, ValueError, AttributeError, ArithmeticError: the line is
                damaged; nothing was added.
        """
        memory, gpu_memory, data = (
            self._numbers(line[n]) for n in ("memory", "gpu_memory", "data")
        )
        # Older lines do not have them, and few hosts show how busy their GPUs are.
        cores = self._numbers(line["cores"]) if "cores" in line else []
        uses = [one for one in line.get("gpu_use", ()) if one is not None]
        steps, seconds = self._numbers([line["steps"], _seconds(line["step_times"])], 2)
        uses = self._numbers(uses, len(uses))
        self._memory = [max(pair) for pair in zip(self._memory, memory, strict=True)]
        self._gpu_memory = max(self._gpu_memory, *gpu_memory)
        self._most_cores = max(self._most_cores, *cores, 0.0)
        self._cores += [math.fsum(cores) / self.size] if cores else []
        self._gpu_use += [math.fsum(uses) / len(uses)] if uses else []
        self._waited += steps * math.fsum(data) / self.size
        self._seconds += seconds

    def _numbers(self, numbers: Sequence[Any], size: int | None = None) -> list[float]:
        found = [float(number) for number in numbers]
        if len(found) != (self.size if size is None else size) or not all(
            map(math.isfinite, found)
        ):
            raise ValueError("another number of ranks, or no finite number")
        return found

    def used(self) -> Used:
        """Return what was used."""
        return Used(
            hosts=self.hosts,
            memory=self._memory,
            cores=(_mean(self._cores), self._most_cores) if self._cores else None,
            gpu_memory=self._gpu_memory,
            gpu_use=_mean(self._gpu_use) if self._gpu_use else None,
            data_wait=self._waited / self._seconds if self._seconds else None,
        )


def measure(timings: Iterable[Mapping[str, Any]]) -> Used | None:
    """Return what the ranks of the last start have used; None if they have recorded nothing.

    Args:
        timings: lines of timings.jsonl, in their order.
    """
    totals = last = None
    for line in timings:
        try:
            hosts = [str(host) for host in line["hosts"]]
            # A damaged line leaves the totals as they are, and is no start of its own.
            totals = last if last is not None and last.hosts == hosts else _Totals(hosts)
            totals.add(line)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            continue
        last = totals
    return last.used() if last is not None else None


def _recorded(line: Mapping[str, Any]) -> float:
    """Return the time of a line of timings.jsonl; 0 if it is damaged."""
    recorded = line.get("time")
    return float(recorded) if isinstance(recorded, (int, float)) else 0.0


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def edge(bucket: float) -> float:
    """Return the seconds at which a bucket of the histograms in timings.jsonl begins."""
    return float(10 ** (bucket / 20)) * 1e-6


def _seconds(buckets: Mapping[str, Any]) -> float:
    """Return the seconds of steps in a histogram, at the middle of each bucket."""
    return math.fsum(count * edge(int(name) + 0.5) for name, count in buckets.items())


def lines(used: Used) -> list[tuple[str, str]]:
    """Return what was used, as names and texts."""
    top = max(range(len(used.memory)), key=used.memory.__getitem__)
    text = f"at most {used.memory[top] / _GB:.2f} GB of a rank, "
    text += f"rank {top} on {printable(used.hosts[top])}; "
    found = [("memory", text + f"{used.on_a_host / _GB:.2f} GB of the ranks of a host")]
    if used.cores:
        mean, most = used.cores
        found.append(("cores", f"{mean:.1f} of a rank in the mean, {most:.1f} at most"))
    if used.gpu_memory:
        busy = "" if used.gpu_use is None else f", at work {used.gpu_use:.0%} of the time"
        found.append(("GPU", f"at most {used.gpu_memory / _GB:.1f} GB{busy}"))
    if used.data_wait is not None:
        found.append(("data", f"{used.data_wait:.0%} of the steps waited for"))
    return found


def enough(used: Used | None, seconds: float | None) -> dict[str, str]:
    """Return options of a job that would have been enough, a quarter more than was used.

    Args:
        used: what its ranks have used; None if it is not known.
        seconds: seconds of the whole job; None if another job would take another time.
    """
    options = {}
    if seconds:
        minutes = math.ceil(max(_LEAST_SECONDS, seconds * _MORE) / 60)
        days, rest = divmod(minutes, 1440)
        clock = f"{rest // 60:02}:{rest % 60:02}:00"
        options["--time"] = f"{days}-{clock}" if days else clock
    if used is not None:
        options["--memory"] = f"{math.ceil(used.on_a_host * _MORE / _GB)}G"
        if used.cores:
            options["--cpus-per-task"] = str(math.ceil(used.cores[1] * _MORE))
    return options


def options_text(options: Mapping[str, str]) -> str:
    """Return options that would have been enough as a line to type, with the reason."""
    words = " ".join(f"{name} {value}" for name, value in options.items())
    return f"{words} (a quarter more)"


def used_so_far(
    directory: RunDirectory, effective: EffectiveTime | None, done: bool, since: float = 0.0
) -> list[tuple[str, str]]:
    """Return what a run has used so far, for the end of the log of its job, as names and texts.

    Args:
        directory: run directory.
        effective: where the time of the run went.
        done: whether the run is done.
        since: time of the launch; nothing is returned if it has trained nothing.
    """
    try:
        lines_of_launch = (
            line for line in directory.each(directory.timings) if _recorded(line) >= since
        )
        used = measure(lines_of_launch)
        starts = len(directory.lines(directory.starts))
    except OSError:
        return []
    if used is None or effective is None:
        return []
    seconds, hosts = effective.wall_seconds - effective.lost_seconds["queue"], len(set(used.hosts))
    hours = f"{hosts * seconds / 3600:.2f} host hours: {hosts} × {seconds:.0f} s"
    options = enough(used, seconds if done and starts == 1 else None)
    return [("used", hours), *lines(used), ("enough", options_text(options))]
