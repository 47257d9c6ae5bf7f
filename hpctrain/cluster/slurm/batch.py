"""Submitting a script, cancelling and requeueing a job."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster.slurm.command import NoAnswerError, ask

__all__ = ["Answer", "batch_script", "cancel", "requeue", "sbatch"]

# sbatch itself tries again where the controller is busy, and for a minute without a slurm.conf.
_SECONDS_TO_SUBMIT = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What sbatch said.

    Attributes:
        code: its exit code; 0 where the job was accepted.
        job: its number, where one was given.
        said: its standard error, for people.
    """

    code: int
    job: str
    said: str


def sbatch(script: bytes, env: Mapping[str, str], options: Sequence[str] = ()) -> Answer:
    """Submit a script, through standard input.

    Args:
        script: the batch script.
        env: of sbatch, which Slurm hands on to the job.
        options: of sbatch, before the script's own.

    Raises:
        NoAnswerError: there is no sbatch, or it did not answer within two minutes.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options], env=dict(env), input=script, capture_output=True,
            timeout=_SECONDS_TO_SUBMIT, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise NoAnswerError("no sbatch on the PATH") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"sbatch has not answered for {_SECONDS_TO_SUBMIT:.0f} s; the job may be accepted still"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NoAnswerError(f"sbatch: {error}") from None
    said = done.stderr.decode(errors="replace").strip()
    # JOBID, or JOBID;CLUSTER; a site's wrapper may say more before it.
    job = re.search(rb"^([0-9]+)(?:;\S*)?\s*\Z", done.stdout, re.MULTILINE)
    return Answer(done.returncode, job[1].decode() if job else "", said)


def batch_script(number: str, env: Mapping[str, str]) -> str:
    """The script of a job of one's own.

    Raises:
        NoAnswerError: it has none, or Slurm did not answer.
    """
    return ask(["scontrol", "write", "batch_script", number, "-"], env)


def cancel(labels: Sequence[str], env: Mapping[str, str]) -> None:
    """Cancel jobs; those that have ended are left as they are.

    Raises:
        NoAnswerError: with Slurm's reason.
    """
    ask(["scancel", *labels], env)


def requeue(label: str, env: Mapping[str, str]) -> None:
    """End a job and let it wait again, with its number.

    Raises:
        NoAnswerError: with Slurm's reason.
    """
    ask(["scontrol", "requeue", label], env)
