"""How the ranks of an attempt ended: on one host, or on all hosts."""

import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["End"]

_LONGEST = 4000


@dataclass(frozen=True, slots=True)
class End:
    """How the ranks of an attempt ended: those of one host, or those of all hosts.

    Attributes:
        code: exit code of the first rank that failed, as in a shell; 0 on success.
        ranks: number of ranks of all hosts; 0 if they could not be started.
        signal: signal that was forwarded to the ranks, or that came after their end; None for none.
        rank: first rank that failed by itself; None if no rank failed.
        host: name of its host.
        time: time of its failure, in seconds since the epoch.
        caused_by_other_rank: whether the failure of another rank caused it.
        brief: description of its end for a person who has seen the output.
        text: the same for a person who has not.
        error: code of an error of hpctrain; empty for another failure.
        stop_unhandled: whether a stop signal ended ranks before they had a session.
        usage: whether all ranks ended with the exit code of wrong use.
        opened: whether a rank has opened a session.
        connected: whether a rank has used one of the stores or was seen to be connected to another
            one, or it is not known.
        fresh: whether the ranks of a next attempt have to be new interpreters.
        recorded: what rank 0 has written to its exit status file: exit code and reason.
        lost: names of the hosts that were lost before they had told how their ranks ended.
    """

    code: int
    ranks: int = 0
    signal: int | None = None
    rank: int | None = None
    host: str = ""
    time: float = 0.0
    caused_by_other_rank: bool = False
    brief: str = ""
    text: str = ""
    error: str = ""
    stop_unhandled: bool = False
    usage: bool = False
    opened: bool = False
    connected: bool = True
    fresh: bool = False
    recorded: tuple[int, str] | None = None
    lost: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; texts are cut, as a message has a longest length."""
        texts = {"brief": self.brief[:_LONGEST], "text": self.text[:_LONGEST]}
        return {**asdict(self), **texts}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "End":
        """Return the end from the fields of `as_json`."""
        recorded = fields.get("recorded")
        return cls(**{**fields, "recorded": (recorded[0], recorded[1]) if recorded else None})

    @classmethod
    def of_hosts(cls, ends: Iterable["End"], lost: Sequence[str] = ()) -> "End":
        """Return the end of an attempt from those of its hosts.

        Args:
            ends: ends of the hosts that have told them.
            lost: names of the others.
        """
        ends = list(ends)
        failed = [end for end in ends if end.rank is not None]
        # That of a rank which no other rank has caused, else the first one.
        first = min(failed, key=lambda one: (one.caused_by_other_rank, one.time), default=None)
        # Ranks that were ended because of another host say nothing, and those that could not be
        # started say more.
        unstarted = next((end.code for end in ends if not end.ranks and end.code), 0)
        killed = 128 + signals.SIGKILL if lost else 0
        code = first.code if first else unstarted or max([*(e.code for e in ends), killed])
        shown = first or cls(code)
        return cls(
            code=code,
            ranks=max((end.ranks for end in ends), default=0),
            signal=next((end.signal for end in ends if end.signal is not None), None),
            rank=shown.rank,
            host=shown.host,
            time=shown.time,
            caused_by_other_rank=shown.caused_by_other_rank,
            brief=shown.brief,
            text=shown.text,
            error=shown.error,
            stop_unhandled=any(end.stop_unhandled for end in ends),
            usage=any(end.usage for end in ends)
            and all(end.usage or end.rank is None for end in ends),
            opened=any(end.opened for end in ends),
            connected=any(end.connected for end in ends),
            fresh=any(end.fresh for end in ends),
            recorded=next((end.recorded for end in ends if end.recorded is not None), None),
            lost=tuple(lost),
        )

    def alone(self, command: Sequence[str], simulates: bool = False) -> str:
        """Return what to tell a person if each rank seems to have trained alone; else empty.

        Args:
            command: program and arguments of each rank.
            simulates: whether the ranks lack the variables of torchrun.
        """
        # The package's own commands, such as `-m hpctrain doctor`, and a help train nothing.
        trains = list(command[1:3]) != ["-m", "hpctrain"] and not {"-h", "--help"} & {*command}
        together = self.opened or self.connected or self.ranks == 1
        if not trains or together or self.code or self.rank is not None:
            return ""
        more = (
            "\n  or:       hpctrain run without --as: the ranks have the variables of torchrun, too"
        )
        return (
            f"none of the {self.ranks} ranks has opened a Session, and no connection between them "
            "was seen: it seems that each rank has trained alone\n"
            "  expected: with hpctrain.Session(…) as session: in the script, or "
            "torch.distributed.init_process_group()\n"
            "  fix:      the option of the script for several ranks, such as Trainer(devices=N) or "
            "--dist-url env://\n"
            "  or:       hpctrain run --nproc-per-node 1 SCRIPT, for a script that trains alone"
            + (more if simulates else "")
        )

    @property
    def conclusion(self) -> str:
        """How the rank failed, for the last line of a start.

        If another rank was the cause of all known failures, none of them is said to be the first.
        """
        return f"{'ended' if self.caused_by_other_rank else 'failed first'}, {self.brief}"

    @property
    def cause(self) -> str:
        """Cause of a failure in one line; empty if it is not known.

        Rank 0 writes the exit status file, also where the failure of another rank is the cause.
        """
        if self.rank is not None and not self.caused_by_other_rank:
            where = f" on {self.host}" if self.host else ""
            how = self.brief.partition("\n")[0].removesuffix(". Its last lines:")
            return f"rank {self.rank}{where} failed, {how}"
        if self.lost and self.recorded is None:
            return f"{', '.join(self.lost)} was lost"
        return self.recorded[1] if self.recorded else ""
