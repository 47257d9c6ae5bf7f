"""Training session of one rank: connects World, Backend and Precision."""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from hpctrain import data, errors
from hpctrain.arguments import Batches, Given, Options, foreign_names, named, names_of
from hpctrain.arguments.keywords import Keywords
from hpctrain.cluster import env_vars, launchers
from hpctrain.cluster.job import Allocation
from hpctrain.data.feed import Placement
from hpctrain.data.loader import check_arguments
from hpctrain.data.shared_order import Shared
from hpctrain.errors import HpctrainError, UsageError, exit_codes
from hpctrain.precision import Precision
from hpctrain.process import failure_record, logging, random_states, read_once
from hpctrain.process.logging import logger
from hpctrain.process.phases import EVALUATING, IDLE
from hpctrain.rendezvous import shared_errors
from hpctrain.rundir.exit_status import write_exit_status
from hpctrain.training import evaluation, prepare
from hpctrain.training.collectives import Collectives
from hpctrain.training.consensus import meet
from hpctrain.training.full_weights import full_state, save_weights, watch_saving
from hpctrain.training.initial_weights import load_weights
from hpctrain.training.preemption import Preemption, Stopped
from hpctrain.training.prepared_optimizer import prepare_optimizer
from hpctrain.training.schedulers import prepare_scheduler
from hpctrain.training.setup import open_ranks
from hpctrain.training.step import Step
from hpctrain.training.training_run import Run

__all__ = ["Session"]

One = TypeVar("One", bound=nn.Module | Optimizer | LRScheduler | DataLoader[Any])
Two = TypeVar("Two", bound=nn.Module | Optimizer | LRScheduler | DataLoader[Any])
More = TypeVarTuple("More")


class Session(Collectives):
    """One rank of a distributed training, from start-up to the end of the process group.

    A session reads rank and world size from the launcher's variables, runs the rendezvous with the
    other ranks, and opens the backend. An uncaught `HpctrainError` ends the process with one
    message and its exit code.

    Args:
        given: command line parsed by `hpctrain.options()`, or a dict of options. Of a command
            line, a session reads only the options that `hpctrain.options()` has added; that of
            another parser sets nothing. If the option `batch_size` is None there, the session sets
            it to the micro-batch size.
        keywords: all options by name (`backend="ddp"`, `precision="bf16"`, …); they override what
            is given.

    Attributes:
        world: rank, world size and hosts of this process; no field is None.
        allocation: job of the scheduler, or None.
        device: device used by this rank.
        backend: backend for the communication between ranks.
        precision: number format of weights, activations and gradients.
        options: options of this session.
        batches: global batch size, micro-batch size and accumulation.
        placement: device, data type and memory layout of batches.
        workers: number of loader processes of this rank.
        preemption: stop requests that this rank has received.

    Raises:
        UsageError: wrong options, or an environment that contradicts itself (exit code 2).
        StartError: not all ranks connected within `start_timeout` seconds.
    """

    allocation: Allocation | None
    device: torch.device
    precision: Precision
    options: Options
    batches: Batches
    placement: Placement
    workers: int
    preemption: Preemption

    def __init__(self, given: Given = None, /, **keywords: Unpack[Keywords]) -> None:
        self._undo = ExitStack()  # restores what a session changes in its process
        hook = sys.excepthook
        super().__init__()
        shared_errors.report_uncaught()
        self.options = Options.of(given, keywords)
        if not self.options.report_errors:
            errors.report_no_uncaught()
            hook = sys.excepthook
        start = launchers.survey()
        logging.setup_logging(start.world.rank)
        if start.world.rank == 0:
            _name_foreign(given, keywords)
        # The exit status file belongs to the start: only rank 0 of that start may write it.
        belongs = start.world.rank == 0 and not start.stray and not start.overruled
        self._exit_status_file = os.environ.get(env_vars.EXIT_STATUS_FILE) if belongs else None
        self._closed = False
        self.preemption = Preemption(
            start.world.rank,
            os.environ,
            start.allocation,
            self._undo,
            handles=self.options.handle_signals,
        )
        if self._exit_status_file:
            # An earlier session of this process may have left a file; it is out of date now.
            Path(self._exit_status_file).unlink(missing_ok=True)
        try:
            self._open(start, named(given), names_of(given))
        except BaseException as error:
            self._undo.close()
            if isinstance(error, HpctrainError):
                failure_record.note_failure(start.world.rank or 0, error, os.environ)
                self._write_exit_status(error.exit_code, error.found)
            raise
        self._hooks = hook, sys.excepthook  # torch.distributed has set its own, too
        failure_record.note_session(self.world.rank, os.environ)
        names = read_once.changed(os.environ)
        if names and self.world.rank == 0:
            failure_record.note_fresh(os.environ)
            logger.warning(
                f"{', '.join(names)} changed after torch was imported for all ranks, without "
                "effect: hpctrain run --fresh-interpreters"
            )

    def _open(
        self, start: launchers.Start, given: MutableMapping[str, Any], names: Set[str]
    ) -> None:
        options = self.options
        self._context = context = open_ranks(
            start,
            options,
            {name: value for name, value in given.items() if name not in names},
            self.preemption,
            self._exit_status_file,
            os.environ,
            self._undo,
        )
        self.allocation, self.world, self.batches = start.allocation, context.world, context.batches
        self.device, self.precision = context.device, context.precision
        self.backend, self.workers = context.backend, context.workers
        self.placement = context.placement
        self._events = context.events
        self.backend.report_to(self._events.heartbeat)
        if context.backend.sharded:
            watch_saving(self._undo)
        self._step = Step(context, self._undo)
        self._undo.callback(self._step.close)
        self._events.weight = partial(setattr, self._step, "weight")
        self._events.exchange = self._meet
        self._events.evaluation, self._events.exhausted = self._align, self._take_part
        if "batch_size" in names and given["batch_size"] is None:
            # With None, DataLoader(dataset, args.batch_size) would return single samples.
            given["batch_size"] = self.batches.batch_size
            # Another session of the script is to take the size of its own loader.
            self._undo.callback(given.__setitem__, "batch_size", None)
        # Same seed on all ranks, so that they create the same weights and split the data alike.
        self._undo.callback(random_states.put_back, random_states.capture(self.device), self.device)
        torch.manual_seed(options.seed)
        random_states.seed(options.seed, self.device, options.seed_everything)
        world = self.world
        logger.info(
            "%d rank%s on %s%s, %s over %s, %s, %s",
            world.world_size,
            "s" if world.world_size > 1 else "",
            ", ".join(world.hosts or ()),
            f" by {world.launcher}" if world.launcher != "none" else "",
            self.backend.name,
            self.backend.transport if world.world_size > 1 else self.device,
            self.precision.name,
            self.batches,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and saves."""
        return self.world.rank == 0

    @property
    def models(self) -> Sequence[nn.Module]:
        """Prepared models, in the order of preparation."""
        return self._context.models

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Prepared optimizers, in the order of preparation."""
        return self._context.optimizers

    @overload
    def prepare(self, thing: One, /, *, split_batches: bool = False) -> One: ...

    @overload
    def prepare(
        self, one: One, two: Two, /, *more: *More, split_batches: bool = False
    ) -> tuple[One, Two, *More]: ...

    @overload
    def prepare(
        self,
        *things: nn.Module | Optimizer | LRScheduler | DataLoader[Any],
        split_batches: bool = False,
    ) -> Any: ...

    # mypy misjudges an implementation for a TypeVarTuple.
    def prepare(self, *things: Any, split_batches: bool = False) -> Any:  # type: ignore[misc]
        """Move models and optimizers to the device and precision, and connect them to all ranks.

        A later call adds further objects: another model, or an optimizer that replaces one with the
        same parameters. All ranks start with the weights of rank 0 and the state of its optimizers.
        A model keeps its attributes, `state_dict()` and parameter names. An optimizer keeps working
        on its parameters, so it can be created before or after its model is prepared. Its
        learning rates and groups stay as they are. Options that change models:
        `--sync-batchnorm`, `--channels-last`, `--compile`.

        A scheduler of a prepared optimizer stays the object that it is. The script calls its
        `step()` as before: in the body of `run.batches` a call counts in the last micro-batch of a
        step, and not after an update that was skipped. It is saved and restored with the run.

        A DataLoader is shared by the ranks: `run.batches` trains with it as with one that was not
        prepared, and any other iteration is an evaluation, which uses each sample once, over all
        ranks. Without `--batch-size` and `--global-batch`, the batch size of the first one is that
        of the session.

        Args:
            things: models, optimizers, schedulers and DataLoaders.
            split_batches: whether the batch size of the DataLoaders is that of all ranks and
                accumulated micro-batches together (default: that of one micro-batch).

        Returns:
            The prepared objects in the given order; for one argument, the object itself.

        Raises:
            UsageError: an object is none of these; an optimizer has parameters of no prepared
                model, a scheduler that of no prepared optimizer; or another rank does something
                else, or has other parameters.
        """
        for thing in things:
            if not isinstance(thing, (nn.Module, Optimizer, LRScheduler, DataLoader, Shared)):
                raise UsageError("HT606.object-cannot-be-prepared", kind=type(thing).__name__)
        context = self._context
        prepare.refuse_unlike(things, context)
        prepared: list[Any] = list(things)
        for place, thing in enumerate(things):
            if isinstance(thing, (DataLoader, Shared)):
                prepared[place] = shared = context.share(thing, split_batches)
                context.adopt(shared)
        self.batches = context.batches
        models = context.models
        for place, thing in enumerate(things):
            if isinstance(thing, nn.Module):
                known = [one for one in models if thing in (one, prepare.inner(one))]
                if not known:
                    models.append(prepare.prepare_model(thing, context))
                prepared[place] = known[0] if known else models[-1]
        self.backend.broadcast(self.precision.masters())
        for thing in things:
            if isinstance(thing, Optimizer) and thing not in context.optimizers:
                prepare_optimizer(thing, context)
                self._step.wrap(thing)
        self._step.watch()
        for thing in things:
            if isinstance(thing, LRScheduler):
                prepare_scheduler(thing, self._step)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def load_weights(
        self,
        model: nn.Module,
        path: str | os.PathLike[str] | Mapping[str, Any],
        *,
        key: str | None = None,
        prefix: str = "",
        skip: Sequence[str] = (),
    ) -> None:
        """Load weights and buffers from a file into a prepared model; all of them or none.

        Call it on all ranks, between `prepare` and `run`. A model that was made on the meta device
        gets its values here. A run that resumes has the weights of its checkpoint, in either order.
        With fsdp each rank reads its rows of each weight; otherwise rank 0 reads for all ranks.

        Args:
            model: prepared model, or a module of one.
            path: safetensors file, as `hpctrain export` writes it; folder of safetensors files, as
                Hugging Face's libraries write it; or file of `torch.save`. Code in a file is never
                run. Also a mapping from names to tensors, such as a `state_dict()`.
            key: key of the weights in a file of `torch.save` (default: the weights themselves, or
                one of the keys `model`, `state_dict`, `model_state_dict` and `module`).
            prefix: start of the names in the file that belong to this model, and that the model's
                own names lack (default: the one that all names in the file start with).
            skip: patterns of names that keep the values of the script, such as `["fc.*"]`.

        Raises:
            UsageError: the model was not prepared, the file cannot be read, its names or shapes
                differ from the model's, or a pattern matches no name; on all ranks.
        """
        load_weights(self._context, model, path, key, prefix, skip)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the full `state_dict()` of a model, over every backend, on all ranks.

        With fsdp, `model.state_dict()` has only what this rank holds of each weight. Call this on
        all ranks; the tensors are copies on the CPU. For large models use `save_weights`, which
        has the full state on rank 0 alone.

        Args:
            model: prepared model, a module of one, or an average of one.

        Returns:
            Tensors by name. Weights in half precision with masters (O2) are those in fp32.
        """
        return full_state(self._context, model)

    def save_weights(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        """Write the full `state_dict()` of a model to a file; called by all ranks.

        `load_weights` reads it, and `load_state_dict` of a model without hpctrain. The run's
        checkpoints have the weights as well: `hpctrain export`.

        Args:
            path: file to write, completely or not at all; an existing one is replaced. With the
                suffix `.safetensors` it has that format, and otherwise that of `torch.save`.
            model: as for `state_dict`.

        Raises:
            UsageError: the file cannot be written; on all ranks.
        """
        save_weights(self._context, path, model)

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
        """Return a loader for the batches of this rank, on its device.

        Args:
            dataset: data set with a length.
            train: if True, use a new random order in each epoch, in steps of `global_batch` samples
                (see `TrainingSampler`); if False, use each sample once, in order, divided among all
                ranks.
            batch_size: batch size for evaluation (default: micro-batch size of the session, which
                training always uses).
            drop_last: for training. True (the default) drops the last samples of an epoch if they
                do not fill a global batch. False makes a smaller step of them, in which each
                micro-batch is weighted by its number of samples.
            on_device: function applied to each batch on the device; the loop receives its result.
                Example: to normalize images that are transferred as bytes.
            arguments: more arguments for `torch.utils.data.DataLoader`, such as `collate_fn`.

        Raises:
            UsageError: the data set is smaller than one step, or the session sets an argument
                itself.
        """
        check_arguments(dataset, train, batch_size, drop_last, arguments)
        length = len(dataset)  # type: ignore[arg-type]
        self._context.datasets.append(dataset)
        sampler: data.TrainingSampler | data.EvaluationSampler
        if train:
            sampler = data.TrainingSampler(
                length, self.batches, self.world, self.options.seed, drop_last is not False
            )
            self._context.samplers.append(sampler)
        else:
            sampler = data.EvaluationSampler(
                length,
                batch_size or self.batches.batch_size,
                self.world,
                even=self.backend.sharded,
            )
        return data.Loader(
            dataset,
            sampler,
            self.placement,
            self.workers,
            self.options.seed,
            self.world.rank,
            self._events,
            on_device=on_device,
            **arguments,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context manager for forward pass and loss in the chosen precision."""
        return self.precision.autocast()

    def step(self, loss: Tensor, *optimizers: Optimizer) -> bool:
        """Run the backward pass, and update the weights after the last micro-batch of a step.

        The update averages the gradients over the micro-batches of all ranks, unscales and clips
        them, applies them, and clears them.

        Args:
            loss: mean loss of a micro-batch, of shape ().
            optimizers: optimizers that take the step (default: all prepared ones).

        Returns:
            True if this was the last micro-batch of its step.

        Raises:
            UsageError: an optimizer was not prepared or needs a closure, optimizers are named
                although micro-batches accumulate, or the loss is no single number with a gradient.
        """
        return self._step.step(loss, optimizers)

    def backward(
        self, loss: Tensor, *, count: float | Tensor | None = None, **keywords: Any
    ) -> None:
        """Run the backward pass of one of the losses of a micro-batch.

        The loss is scaled as the precision needs it, and divided by the number of micro-batches
        that accumulate. After it, in the last micro-batch of a step, the gradients are averaged
        over all ranks. `step()` and `zero_grad()` of a prepared optimizer then work as in plain
        torch. While micro-batches accumulate, each one gives the optimizer what its losses add
        between `zero_grad()` and `step()`, and the weights change in the last one.

        Args:
            loss: mean loss of a micro-batch, of shape (); with `count`, the sum.
            count: number of terms in the sum: tokens, pixels or boxes of this micro-batch. Then the
                gradients of the step are divided by the total over its micro-batches and all ranks,
                which no rank needs to know. All losses of a micro-batch have the same count, and
                all losses of a step have one. If the total is 0, the weights do not change. A
                tensor of shape () stays on its device.
            keywords: arguments for `Tensor.backward`, such as `retain_graph=True`.

        Raises:
            UsageError: the loss is no single number with a gradient, micro-batches accumulate
                outside of `run.batches`, or the counts of a step contradict each other.
        """
        self._step.backward(loss, count, keywords)

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last micro-batch of its step, in which optimizers step."""
        return self._step.last

    def unscale_gradients(self, *optimizers: Optimizer) -> None:
        """Remove the loss scale from the gradients, before the script reads or changes them.

        It does nothing in a precision without a loss scale, in a step where it was done already,
        and between the micro-batches of a step.

        Args:
            optimizers: optimizers of the parameters (default: all prepared ones).
        """
        self._step.unscale_all(optimizers)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the norm of the averaged gradients, without the loss scale.

        Args:
            parameters: parameters of prepared models, such as `model.parameters()`.
            max_norm: largest norm of all gradients together; `math.inf` only measures.
            norm_type: p of the p-norm.

        Returns:
            The norm before it was clipped, of shape (), equal on all ranks; None between the
            micro-batches of a step. The next row of metrics has it as `grad_norm`.
        """
        return self._step.clip(
            parameters, lambda found: nn.utils.clip_grad_norm_(found, max_norm, norm_type)
        )

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the averaged gradients to [-clip_value, clip_value].

        Args:
            parameters: parameters of prepared models.
            clip_value: largest absolute value.
        """
        self._step.clip(parameters, lambda found: nn.utils.clip_grad_value_(found, clip_value))

    @overload
    def sum(self, value: Any, /) -> float: ...

    @overload
    def sum(self, *values: Any) -> tuple[float, ...]: ...

    def sum(self, *values: Any) -> float | tuple[float, ...]:
        """Sum each value over all ranks, exactly; see `evaluation.total`.

        Returns:
            One Python number for each value; for one value, the number itself.
        """
        self._meet(f"session.sum() of {len(values)}")
        sums = evaluation.total(self.backend, *values)
        self._events.heartbeat.enter(IDLE)
        return sums[0] if len(sums) == 1 else sums

    def classification(self, classes: int) -> evaluation.Classification:
        """Return a counter for exact scores of a classifier over all ranks, kept on the device.

        Args:
            classes: number of classes.
        """
        return evaluation.Classification(self.backend, classes, self._events)

    def run(self, state: dict[str, Any] | None = None, name: str | None = None) -> Run:
        """Create a run, which has a directory, a position in the loop, metrics and checkpoints.

        Args:
            state: objects to save in checkpoints besides the prepared models and optimizers, by
                name; a resume fills them in place. Of objects with `state_dict()` and
                `load_state_dict()`, all ranks get the state of rank 0. Each rank keeps its own
                values of: dicts and lists of numbers, texts, None, tensors, dicts and lists;
                tensors; `torch.Generator`, `random.Random` and `numpy.random.Generator`.
            name: name of the run (default: name of the script). A script with several runs, such
                as the folds of a cross-validation, gives each a name; with `--run-dir DIR` and in a
                job, each has the directory DIR/NAME.

        Raises:
            UsageError: an object of `state` cannot be filled in place, such as a number.
        """
        return Run(self._context, self._step, state or {}, name)

    @property
    def weight(self) -> float:
        """Weight of the current micro-batch in its step; 1 if all have as many samples.

        The session's loaders set it; with a loader of your own, set it in each micro-batch that
        needs one. After the micro-batch it is 1 again.
        """
        return self._step.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._step.weight = weight

    def _meet(self, doing: str) -> None:
        """Wait for all ranks before an exchange that belongs to an evaluation."""
        meet(self.backend, doing, self._events, EVALUATING)

    def _align(self) -> None:
        self._gathered = False
        self._meet("the beginning of an evaluation")
        for model in self._context.models:
            self.backend.broadcast(list(model.buffers()))

    def close(
        self, code: int = exit_codes.DONE, reason: str = "done", together: bool | None = None
    ) -> None:
        """Close the session, and write the exit status file.

        Ranks that leave together wait until the file is written.

        Args:
            code: exit code of `exit_codes`.
            reason: one line of text for the exit status file.
            together: whether all ranks leave now and wait for each other (default: only if `code`
                is `exit_codes.DONE`).
        """
        if self._closed:
            return
        self._closed = True
        self.preemption.close()
        together = code == exit_codes.DONE if together is None else together
        try:
            if together:
                meet(self.backend, "the end of the session")
            self._write_exit_status(code, reason)
            if together:
                self.backend.barrier()
        except Exception as error:
            explained = self.backend.explain(error)
            failure_record.note_failure(self.world.rank, explained or error, os.environ)
            together, reason = False, explained.found if explained else str(error)
            code = exit_codes.FAILED
            if explained:
                raise explained from None
            raise
        finally:
            self.backend.close(None if together else reason)
            self._undo.close()
            # After a failure, the hook still has to report the error.
            if code == exit_codes.DONE and sys.excepthook is self._hooks[1]:
                sys.excepthook = self._hooks[0]

    def _write_exit_status(self, code: int, reason: str) -> None:
        if self._exit_status_file:
            try:
                write_exit_status(self._exit_status_file, code, reason)
            except OSError as error:
                logger.error(
                    "the exit status could not be written to %s: %s", self._exit_status_file, error
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Stopped):
            self.close(exit_codes.STOPPED, error.reason, error.together)
            self.preemption.hand_on()
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        explained = self.backend.explain(error)
        failure = explained or error
        failure_record.note_failure(self.world.rank, failure, os.environ)
        if isinstance(failure, HpctrainError):
            self.close(failure.exit_code, failure.found)
        elif isinstance(failure, SystemExit) and isinstance(failure.code, int):
            self.close(failure.code, f"the script left with {failure.code}")
        else:
            self.close(exit_codes.FAILED, f"{type(failure).__name__}: {failure}")
        if explained:
            raise explained from None


def _name_foreign(given: Given, keywords: Collection[str]) -> None:
    """Log which values of another parser's command line set no option, though one has the name."""
    names = [name for name in foreign_names(given) if name not in keywords]
    if names:
        logger.warning(
            "hpctrain.options() has not parsed this command line, so these arguments are the "
            "script's alone and set no option of hpctrain: %s (to set them: parser = "
            "hpctrain.options(), or keywords: hpctrain.Session(%s=…))",
            ", ".join(names),
            names[0],
        )
