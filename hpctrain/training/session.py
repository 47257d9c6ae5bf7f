"""Session: the only place where World, Backend and Precision meet."""

import argparse
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from hpctrain import data, rundir
from hpctrain.arguments import Options
from hpctrain.backends.base import Backend
from hpctrain.cluster import env_vars, launchers
from hpctrain.errors import HpctrainError, UsageError, report_uncaught
from hpctrain.monitoring.watchdog import ACCUMULATING, BACKWARD, EVALUATING, IDLE, UPDATING, WAITING
from hpctrain.optim import EMA
from hpctrain.process import failure_record, logging, random_states
from hpctrain.process.logging import logger
from hpctrain.training import evaluation, prepare
from hpctrain.training.consensus import meet
from hpctrain.training.gradient_guard import GradientGuard
from hpctrain.training.optimizer_step import Update
from hpctrain.training.preemption import Preemption, Stopped
from hpctrain.training.run import Run, ignore
from hpctrain.training.setup import open_ranks
from hpctrain.training.state import Loop

__all__ = ["Session"]


class Session:
    """One rank among those that train together, from the start to the end of the process group.

    Opening it finds out who this process is, meets the other ranks, and opens the backend. An
    `HpctrainError` that nobody catches then ends the process with one message and its exit code.

    Args:
        namespace: a command line parsed by `hpctrain.options()`. Its `batch_size` is set to that of
            a micro-batch where the command line left it open.
        keywords: the same options by name (`backend="ddp"`, `precision="bf16"`, …); they win.

    Attributes:
        world: this rank, complete: nothing in it is None.
        allocation: the scheduler's job, or None.
        device: of this rank.
        backend: how the ranks talk.
        precision: how numbers are kept.
        options: as given.
        own_options: by name, those that the script added to them.
        batches: global batch, micro-batch and accumulation.
        placement: where batches go.
        workers: loader processes of this rank.
        weight: of the micro-batch at hand in its step; 1 where all have as many samples.
        roster: the ranks, their hosts and what they told.
        preemption: whether this rank was asked to stop.
        verdict: the file for how it ended, at rank 0 of a start that wants to know.
        beat: called with a phase of `watchdog`; tells that this rank lives.
        loop: the run that is open; it counts the steps.

    Raises:
        UsageError: wrong options, or an environment that contradicts itself (exit code 2).
        StartError: the ranks did not come together within `start_timeout` seconds.
    """

    def __init__(self, namespace: argparse.Namespace | None = None, **keywords: Any) -> None:
        report_uncaught(lambda: failure_record.shows(os.environ))
        self.options = Options.of(namespace, keywords)
        shared = {field.name for field in dataclasses.fields(Options)}
        self.own_options: Mapping[str, Any] = (
            {name: value for name, value in vars(namespace).items() if name not in shared}
            if namespace
            else {}
        )
        start = launchers.survey()
        logging.setup_logging(start.world.rank)
        # The verdict is that of the start; a process that is none of its ranks leaves it alone.
        belongs = start.world.rank == 0 and not start.stray and not start.overruled
        self.verdict = os.environ.get(env_vars.VERDICT) if belongs else None
        self.heartbeat: Callable[[int], None] = ignore
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self.loop: Loop | None = None
        self._micro_batch = 0
        self._guard = GradientGuard()
        self._ema: EMA | None = None
        self._samplers: list[data.TrainingSampler] = []
        self._datasets: list[Dataset[Any]] = []
        self.weight = 1.0
        self._closed = False
        self._undo = ExitStack()  # what a session changes in its process, and puts back
        self.preemption = Preemption(start.world.rank, os.environ, start.allocation, self._undo)
        if self.verdict:
            # That of an earlier session of this process says nothing about this one.
            Path(self.verdict).unlink(missing_ok=True)
        try:
            self._open(start)
            if namespace is not None and getattr(namespace, "batch_size", 0) is None:
                # Or DataLoader(dataset, args.batch_size) would give single samples.
                namespace.batch_size = self.batches.batch_size
        except BaseException as error:
            self._undo.close()
            if isinstance(error, HpctrainError):
                failure_record.note_failure(start.world.rank or 0, error, os.environ)
                self._write_verdict(error.exit_code, error.found)
            raise
        failure_record.note_session(self.world.rank, os.environ)

    def _open(self, start: launchers.Start) -> None:
        opts = self.options
        opened = open_ranks(start, opts, os.environ, self._undo)
        self.preemption.opened()
        self.allocation = start.allocation
        self.world, self.roster, self.batches = opened.world, opened.roster, opened.batches
        self.device, self.precision = opened.device, opened.precision
        self.backend, self.workers = opened.backend, opened.workers
        # A call that does nothing is one too many where a step takes microseconds.
        self._attaches = type(self.backend).attach is not Backend.attach
        self.placement = prepare.place_batches(opts, self.precision)
        self._update = Update(self.backend, self.precision, opts)
        # The same on all ranks, so that they make the same weights and split the data alike.
        torch.manual_seed(opts.seed)
        random_states.seed(opts.seed, self.device, opts.seed_everything)
        world = self.world
        logger.info(
            "%d rank%s on %s by %s, %s over %s, %s, global batch %d = %d × %d × %d",
            world.world_size,
            "s" if world.world_size > 1 else "",
            ", ".join(world.hosts or ()),
            world.launcher,
            self.backend.name,
            self.backend.transport if world.world_size > 1 else self.device,
            self.precision.name,
            self.batches.global_batch,
            self.batches.batch_size,
            self.batches.accumulate,
            world.world_size,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and saves."""
        return self.world.rank == 0

    @property
    def models(self) -> Sequence[nn.Module]:
        """The prepared models, in their order."""
        return self._models

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The prepared optimizers, in their order."""
        return self._optimizers

    def prepare(self, *things: nn.Module | Optimizer) -> Any:
        """Bring models and optimizers to the device and precision, and let the ranks share them.

        Called once more it takes up what is new: an optimizer in the place of one with the same
        parameters, another model. All ranks begin with rank 0's weights, and with the state of its
        optimizers. A model's
        attributes, `state_dict()` and parameter names stay as they were. An optimizer keeps working
        on its parameters, so it can be made before or after. Options change both: see
        `--sync-batchnorm`, `--channels-last`, `--compile`, `--decay` and `--lr-scaling`.

        Returns:
            The things, in their order; a single one alone.

        Raises:
            UsageError: something that is neither a model nor an optimizer; a model that the file
                of `--init-from` does not fit; or an optimizer with parameters of no prepared model,
                that needs a closure, or with a scheduler that an option would mislead.
        """
        for thing in things:
            if not isinstance(thing, (nn.Module, Optimizer)):
                raise UsageError(
                    f"prepare() got a {type(thing).__name__}",
                    "models (torch.nn.Module) and optimizers (torch.optim.Optimizer)",
                    "session.loader(dataset) is for data",
                )
        prepared = list(things)
        for place, thing in enumerate(things):
            if isinstance(thing, nn.Module):
                known = [one for one in self._models if thing in (one, prepare.inner(one))]
                if known:
                    prepared[place] = known[0]
                    continue
                model = prepare.prepare_model(
                    thing,
                    len(self._models),
                    self.backend,
                    self.precision,
                    self.placement,
                    self.options,
                )
                prepared[place] = model
                self._models.append(model)
        self.backend.broadcast(self.precision.masters())
        for thing in things:
            if isinstance(thing, Optimizer) and thing not in self._optimizers:
                prepare.prepare_optimizer(thing, self._models, self.options, self.batches)
                self.precision.adopt(thing)
                prepare.share_state(thing, self.backend)
                for other in prepare.replaced(thing, self._optimizers):
                    self._optimizers.remove(other)
                thing.register_step_post_hook(self._stepped)
                self._optimizers.append(thing)
        if self.options.ema is not None:
            self._ema = EMA(self._models, self.options.ema, source=self.precision.master)
        self._guard.watch(self._models, self._optimizers, self.precision)
        self._arm()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        train: bool = True,
        batch_size: int | None = None,
        drop_last: bool | None = None,
        on_device: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> data.Loader:
        """The batches of this rank, on its device.

        Args:
            dataset: with a length.
            train: a new order in each epoch, in steps of `global_batch` samples (see
                `TrainingSampler`); otherwise every sample once, in order, over all ranks.
            batch_size: of an evaluation (default: that of the session, as for a training).
            drop_last: of a training, whether it leaves out the samples at the end of an epoch that
                do not fill a global batch (the default); else they are a step of their own, in
                which each micro-batch counts by its samples.
            on_device: called with each batch there, gives the one that the loop gets: normalises
                images that were sent as bytes, for one (`hpctrain.data.Normalize`).
            arguments: more for `torch.utils.data.DataLoader`, such as `collate_fn`.

        Raises:
            UsageError: fewer samples than a step takes, or an argument that the session sets.
        """
        data.check_arguments(dataset, train, batch_size, drop_last, arguments)
        length = len(dataset)  # type: ignore[arg-type]
        self._datasets.append(dataset)
        sampler: data.TrainingSampler | data.EvaluationSampler
        if train:
            sampler = data.TrainingSampler(
                length, self.batches, self.world, self.options.seed, drop_last is not False
            )
            self._samplers.append(sampler)
        else:
            sampler = data.EvaluationSampler(
                length, batch_size or self.batches.batch_size, self.world
            )
        return data.Loader(
            dataset,
            sampler,
            self.placement,
            self.workers,
            self.options.seed,
            self.world.rank,
            before=(lambda: None) if train else self._align,
            weigh=self._weigh,
            each=None if train else lambda: self.heartbeat(EVALUATING),
            on_device=on_device,
            **arguments,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Around the forward pass and the loss: the precision that was asked for."""
        return self.precision.autocast()

    def step(self, loss: Tensor, *optimizers: Optimizer) -> bool:
        """What follows a loss: backward pass, and after the last micro-batch of a step the update.

        Gradients are averaged over the micro-batches of all ranks, unscaled, clipped, applied and
        cleared.

        Args:
            loss: the mean over a micro-batch, of shape ().
            optimizers: those to step; all prepared ones when none is named.

        Returns:
            Whether it was the last micro-batch of its step.

        Raises:
            UsageError: optimizers are named while micro-batches accumulate, or were not prepared.
        """
        accumulate = self.batches.accumulate
        if not self._optimizers or (
            optimizers and any(one not in self._optimizers for one in optimizers)
        ):
            raise UsageError(
                "session.step() with an optimizer that was not prepared"
                if optimizers
                else "session.step(), and no optimizer was prepared",
                "gradients that are averaged, applied and cleared",
                "model, optimizer = session.prepare(model, optimizer)",
            )
        if optimizers and accumulate > 1:
            raise UsageError(
                f"session.step(loss, optimizer), and {accumulate} micro-batches accumulate",
                "session.step(loss), one loss for all optimizers",
                "--accumulate 1",
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UsageError(
                f"session.step() with {_described(loss)}",
                "the mean loss of a micro-batch: a tensor of one number that has a gradient",
                "session.step(loss.mean())",
            )
        loop, first = self.loop, self._micro_batch == 0
        if loop is not None:
            loop.stepping()
        self._guard.before(first)
        last = self._micro_batch + 1 == accumulate
        self.heartbeat(BACKWARD if last else ACCUMULATING)
        if self._attaches:
            loss = self.backend.attach(loss, first)
        if self.weight != 1.0:
            loss = loss * self.weight
        self.precision.backward(loss if accumulate == 1 else loss / accumulate)
        self._micro_batch += 1
        if not last:
            self._guard.between()
            self._arm()
            return False
        self._micro_batch = 0
        self.heartbeat(UPDATING)
        self._update(optimizers or self._optimizers, self._optimizers, self._ema)
        if loop is not None:
            loop.stepped()  # the optimizer has said so itself, but for a step that overflowed
        if accumulate > 1:
            self._arm()
        return True

    def forget_step(self) -> int:
        """Drop the micro-batches of a step that does not come to its end; return how many."""
        dropped, self._micro_batch = self._micro_batch, 0
        if dropped:
            self.backend.forget()
            for optimizer in self._optimizers:
                self.precision.clear(optimizer)
            self._arm()
        return dropped

    def _arm(self) -> None:
        """Let only the last micro-batch of a step synchronise the gradients."""
        if self.batches.accumulate > 1:
            last = self._micro_batch == self.batches.accumulate - 1
            for model in self._models:
                self.backend.synchronize(model, last)

    def sum(self, *values: Any) -> Any:
        """Each value summed over all ranks, exactly; see `evaluation.total`.

        Returns:
            As many Python numbers; a single one alone.
        """
        self._meet(f"session.sum() of {len(values)}")
        sums = evaluation.total(self.backend, *values)
        self.heartbeat(IDLE)
        return sums[0] if len(sums) == 1 else sums

    def classification(self, classes: int) -> evaluation.Classification:
        """Exact scores of a classifier over all ranks, counted on the device.

        Args:
            classes: how many there are.
        """
        return evaluation.Classification(
            self.backend,
            classes,
            before=lambda: self._meet(f"scores of {classes} classes"),
            after=lambda: self.heartbeat(IDLE),
        )

    def run(self, state: dict[str, Any] | None = None, name: str | None = None) -> Run:
        """A run: its directory, its position in the loop, its metrics and checkpoints.

        Args:
            state: by name, what besides the prepared models and optimizers belongs into a
                checkpoint: things with `state_dict()` and `load_state_dict()`.
            name: of the run (default: that of the script).
        """
        return Run(self, state or {}, name)

    def averaged_weights(self) -> AbstractContextManager[Any]:
        """Within it the prepared models have the averages that `--ema` keeps of their weights.

        For an evaluation. Without `--ema` they keep their weights.
        """
        return nullcontext() if self._ema is None else self._ema.swapped()

    @property
    def ema(self) -> EMA | None:
        """The average of the prepared models' weights, where `--ema` asks for one."""
        return self._ema

    @property
    def samplers(self) -> Sequence[data.TrainingSampler]:
        """Those of the loaders of training sets."""
        return self._samplers

    @property
    def datasets(self) -> Sequence[Dataset[Any]]:
        """Those of the loaders, in the order in which they were made."""
        return self._datasets

    def _stepped(self, *_: Any) -> None:
        """An optimizer has stepped, by `step` or by the script itself."""
        if self.loop is not None:
            self.loop.stepped()

    def _weigh(self, weight: float) -> None:
        self.weight = weight

    def _meet(self, doing: str) -> None:
        """Before an exchange that belongs to an evaluation."""
        self.heartbeat(WAITING)
        meet(self.backend, doing)
        self.heartbeat(EVALUATING)

    def _align(self) -> None:
        self._meet("the beginning of an evaluation")
        for model in self._models:
            self.backend.broadcast(list(model.buffers()))

    def close(
        self, code: int = rundir.DONE, reason: str = "done", together: bool | None = None
    ) -> None:
        """Leave together: the verdict is written before any rank is gone.

        Args:
            code: an exit code of `rundir`.
            reason: a line for people.
            together: whether all ranks leave now and wait for each other (default: when done).
        """
        if self._closed:
            return
        self._closed = True
        self.preemption.close()
        together = code == rundir.DONE if together is None else together
        try:
            if together:
                self.backend.barrier()
            self._write_verdict(code, reason)
            if together:
                self.backend.barrier()
        except Exception as error:
            together, reason = False, str(error)
            if explained := self.backend.explain(error):
                reason = explained.found
                raise explained from None
            raise
        finally:
            self.backend.close(None if together else reason)
            self._undo.close()

    def _write_verdict(self, code: int, reason: str) -> None:
        if self.verdict:
            try:
                rundir.write_verdict(self.verdict, code, reason)
            except OSError as error:
                logger.error("the verdict could not be written to %s: %s", self.verdict, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Stopped):
            self.close(rundir.STOPPED, error.reason, error.together)
            self.preemption.hand_on()
        elif error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif explained := self.backend.explain(error):
            failure_record.note_failure(self.world.rank, explained, os.environ)
            self.close(explained.exit_code, explained.found)
            raise explained from None
        else:
            failure_record.note_failure(self.world.rank, error, os.environ)
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        if isinstance(error, HpctrainError):
            self.close(error.exit_code, error.found)
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            self.close(error.code, f"the script left with {error.code}")
        else:
            self.close(rundir.FAILED, f"{type(error).__name__}: {error}")


def _described(loss: Any) -> str:
    """What was given in the place of a loss."""
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    if loss.numel() != 1:
        return f"a loss of shape {tuple(loss.shape)}"
    return "a loss without a gradient (made under torch.no_grad(), or detached)"
