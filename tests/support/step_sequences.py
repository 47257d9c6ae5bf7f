"""Random training programs: run by a session, and by plain torch over the whole batch of a step.

A program is the loop of a script: how its body calls backward passes, `step` and `zero_grad`, over
which micro-batches, and where the run stops and resumes. `expected` trains it in one process,
without hpctrain, without micro-batches and without an interruption.
"""

import os
import signal
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import softplus
from torch.optim import lr_scheduler

import hpctrain

# With micro-batches that accumulate, a zero_grad() drops only what this micro-batch has added to
# the gradients of its optimizer: bodies in which that makes a difference.
ACCUMULATED_DISCARDS = True
# With micro-batches that accumulate, a scheduler's step() counts in the last one alone: bodies that
# call it without `if session.sync_gradients`.
ACCUMULATED_SCHEDULES = True
# A run resumes in an epoch that has batches left, but no step.
RESUMED_RESTS = True
# The options of the session clip also the gradients of a step by a closure.
CLIPPED_CLOSURES = True

SHORT, CLOSURE, ADVERSARIES = "session.step", "closure", "GAN"
# Bodies of a loop with one model. B1 and B2 are backward passes of two losses, R1 one of the first
# loss in two parts, Z is zero_grad, S is step.
BODIES = [
    *("B1 S Z", "Z B1 S", "B1 B2 S Z", "Z B1 B2 S", "R1 S Z", "R1 B2 S Z", "B2 S Z"),
    *("B1 Z B2 S Z", "Z B1 Z B2 S", "B1 Z R1 S Z"),
]
MAX_NORM = 0.3


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        seed: of the data and the initial weights.
        samples: number of samples in a micro-batch.
        accumulate: number of micro-batches of a rank in a step.
        epochs: bodies of each epoch: `.` has a pass, `s` is left by `continue` before it, `b` by
            `break` before it, `B` by `break` at its end.
        stream: whether `run.batches` gets the batches of this rank, not their numbers. Their number
            is a multiple of `accumulate`: else one process makes a smaller step of the last ones.
        loop: how the body trains: `SHORT`, `CLOSURE`, or calls in their order. With two models,
            `d` is the critic of a GAN and `g` its generator: Bd and Bg are backward passes of their
            losses, Sd and Sg steps, Zd and Zg zero_grad.
        gated: whether what follows the last backward pass is under `if session.sync_gradients`.
        optimizers: kind of the optimizer of each model.
        clip: how gradients are clipped: by a call, by the option of the session, or not.
        schedule: kind of the schedulers, or None.
        ticks: where they step: before or after the step of their optimizer, after it under
            `if session.sync_gradients`, or once in each epoch.
        early: whether the schedulers are made before `session.prepare`.
        overflow: step, its micro-batch and rank whose loss is infinite, with a loss scale; or None.
        stops: where the run ends early, each time resumed: kind and step.
        every: `checkpoint_every` of the session.
        saves: steps after which the body calls `run.save()`.
    """

    seed: int = 0
    samples: int = 1
    accumulate: int = 1
    epochs: tuple[str, ...] = ("..",)
    stream: bool = False
    loop: str = SHORT
    gated: bool = False
    optimizers: tuple[str, ...] = ("SGD",)
    clip: str | None = None
    schedule: str | None = None
    ticks: str = "after"
    early: bool = False
    overflow: tuple[int, int, int] | None = None
    stops: tuple[tuple[str, int], ...] = ()
    every: int | None = None
    saves: frozenset[int] = field(default_factory=frozenset)

    @property
    def dtype(self):
        return torch.float64 if self.overflow is None else torch.float32

    def passes(self, epoch):
        """Return the numbers of the bodies of an epoch that have a backward pass."""
        found = []
        for number, body in enumerate(self.epochs[epoch]):
            if body in ".B":
                found.append(number)
            if body in "bB":
                break
        return found

    def resumable(self, epoch):
        """Return the bodies of an epoch without those that a resumed run cannot leave out.

        After a break at the end of a body, a checkpoint inside that body does not know of it.
        """
        bodies, passes = self.epochs[epoch], self.passes(epoch)
        if not RESUMED_RESTS:
            return bodies[: passes[len(passes) // self.accumulate * self.accumulate - 1] + 1]
        return bodies.partition("B")[0] + ("B" if "B" in bodies else "")

    def steps(self):
        return sum(len(self.passes(n)) // self.accumulate for n in range(len(self.epochs)))

    def data(self, world):
        """Return points by epoch and body, each of shape (world, samples, 4)."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = {"dtype": torch.float64, "generator": generator}
        shapes = [[(world, self.samples, 4)] * len(bodies) for bodies in self.epochs]
        return [[torch.randn(one, **draw).to(self.dtype) for one in epoch] for epoch in shapes]

    def models(self):
        """Return models with random weights: one network, or a critic and a generator."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))]
        if len(self.optimizers) > 1:
            models.append(nn.Linear(4, 4))
        for model in models:
            model.to(self.dtype)
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                parameter.data.copy_(0.5 * drawn)
        return models

    def optimizer(self, place, model):
        if self.optimizers[place] == "SGD":
            return torch.optim.SGD(model.parameters(), 0.05, 0.9)
        # A large eps, so that rounding of small gradients does not decide about the update.
        return torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1, eps=1e-3)

    def schedulers(self, optimizers):
        if self.schedule is None:
            return []
        return [SCHEDULES[self.schedule](one, self.steps() + 2) for one in optimizers]


SCHEDULES = {
    "StepLR": lambda optimizer, steps: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "ExponentialLR": lambda optimizer, steps: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "OneCycleLR": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, steps),
}


def losses(models, points):
    """Return the losses of a micro-batch by name."""
    if len(models) == 1:
        (model,) = models
        outputs = model(points)
        first = ((outputs - points.sum(1, keepdim=True)) ** 2).mean()
        return {"1": first, "2": model(points.flip(1)).cos().mean() + outputs.mean()}
    critic, generator = models
    fake = generator(points.flip(1))
    loss = softplus(-critic(points)).mean() + softplus(critic(fake.detach())).mean()
    return {"d": loss, "g": softplus(-critic(fake)).mean()}


# --- Plain torch -------------------------------------------------------------------------------


def parts(loop, clears=True):
    """Return how often each loss is in the gradients of each optimizer, as it steps.

    Args:
        loop: calls of a body, in their order.
        clears: whether zero_grad is called.
    """
    if loop in (SHORT, CLOSURE):
        return [Counter("1")]
    names = ["d", "g"] if "Bd" in loop else [""]
    held = {name: Counter() for name in names}
    stepped = {}
    for call in (loop + " " + loop).split():  # what the first body leaves may be in the second
        kind, name = call[0], call[1:]
        if kind == "S":
            stepped[name] = Counter(held[name])
        elif kind == "Z" and clears:
            held[name].clear()
        elif kind in "BR":
            for one in held if name == "g" else [name if name in held else ""]:
                held[one][name] += 1  # the generator's loss is also the critic's
    return [stepped[name] for name in names]


@dataclass
class Outcome:
    """What a training ends with.

    Attributes:
        step: number of steps.
        weights, states: all weights, and all tensors of the optimizers.
        rates: learning rates of all optimizers after each step, and at the end.
        norms: norms of the gradients of each optimizer before they were clipped.
    """

    step: int
    weights: list[float]
    states: list[float]
    rates: list[float]
    norms: list[float]


def expected(program, world):
    """Train with plain torch in one process, over the samples of all ranks and micro-batches."""
    models, data, rates, step = program.models(), program.data(world), [], 0
    norms = [[] for _ in models]
    optimizers = [program.optimizer(*one) for one in enumerate(models)]
    schedulers = program.schedulers(optimizers)
    for epoch in range(len(program.epochs)):
        bodies = program.passes(epoch)
        for last in range(program.accumulate, len(bodies) + 1, program.accumulate):
            numbers = bodies[last - program.accumulate : last]
            points = torch.cat([data[epoch][number].flatten(0, 1) for number in numbers])
            found = losses(models, points)
            for model, given, measured in zip(models, parts(program.loop), norms, strict=True):
                loss = sum(count * found[name] for name, count in given.items())
                own = list(model.parameters())
                gradients = torch.autograd.grad(loss, own, retain_graph=True)
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = gradient
                if program.clip is not None:
                    norm = nn.utils.clip_grad_norm_(own, MAX_NORM)
                    measured.append(norm.item())
            if program.ticks == "before":
                tick(schedulers)
            if program.overflow is None or program.overflow[0] != step:
                for optimizer in optimizers:
                    optimizer.step()
                if program.ticks in ("after", "gated"):
                    tick(schedulers)
            step += 1
            rates += rates_of(optimizers)
        if program.ticks == "epoch":
            tick(schedulers)
    return outcome(step, models, optimizers, rates, norms if program.clip == "call" else [])


def tick(schedulers):
    for scheduler in schedulers:
        scheduler.step()


def rates_of(optimizers):
    return [float(group["lr"]) for one in optimizers for group in one.param_groups]


def outcome(step, models, optimizers, rates, norms, whole=lambda tensor: tensor):
    """Return the outcome of a training.

    Args:
        step, rates, norms: attributes of the outcome.
        models, optimizers: after the training.
        whole: function that returns all of a tensor of which this rank may hold a part.
    """
    weights = [p.detach() for model in models for p in model.parameters()]
    states = [
        (whole(value) if value.dim() else value).detach()
        for one in optimizers
        for parameter in one.param_groups[0]["params"]
        for _, value in sorted(one.state[parameter].items())
        if isinstance(value, torch.Tensor)
    ]
    return Outcome(
        step,
        [number for one in weights for number in whole(one).double().flatten().tolist()],
        [number for one in states for number in one.double().flatten().tolist()],
        [*rates, *rates_of(optimizers)],
        [norm for one in norms for norm in one],
    )


# --- A session ---------------------------------------------------------------------------------


class Crash(Exception):
    """An error of the script."""


class Loop:
    """The loop of a program in a session.

    Args:
        program: the program.
        opened: session.
        stop: kind and step of the end of this start; None if it trains to the end.
    """

    def __init__(self, program, opened, stop):
        self.program, self.session, self.stop = program, opened, stop
        self.models = program.models()
        self.optimizers = [program.optimizer(*one) for one in enumerate(self.models)]
        self.schedulers = program.schedulers(self.optimizers) if program.early else []
        prepared = opened.prepare(*self.models, *self.optimizers, *self.schedulers)
        self.models = list(prepared[: len(self.models)])
        if not program.early:
            self.schedulers = program.schedulers(self.optimizers)
            for scheduler in self.schedulers:
                opened.prepare(scheduler)
        self.norms, self.rates = [[] for _ in self.models], []

    def train(self):
        program, opened = self.program, self.session
        world = opened.world
        data = program.data(world.world_size)
        with opened.run() as run:
            for epoch in run.epochs(len(program.epochs)):
                done = 0  # micro-batches of the step
                numbers = range(len(data[epoch]))
                if program.stream:
                    numbers = [(n, points[world.rank]) for n, points in enumerate(data[epoch])]
                for batch in run.batches(numbers):
                    number, points = (
                        batch if program.stream else (batch, data[epoch][batch][world.rank])
                    )
                    kind, last = program.epochs[epoch][number], done == program.accumulate - 1
                    assert opened.sync_gradients is last, "before the pass"
                    if kind == "b":
                        break
                    if kind == "s":
                        continue
                    before = run.step
                    self.body(points, self.factor(before, done, world))
                    assert run.step == before + last, "after the body"
                    assert opened.sync_gradients is last, "after the body"
                    done = 0 if last else done + 1
                    self.after(run, last)
                    if kind == "B":
                        break
                if program.ticks == "epoch":
                    tick(self.schedulers)
        return outcome(
            run.step, self.models, self.optimizers, self.rates, self.norms, opened.backend.whole
        )

    def factor(self, step, micro_batch, world):
        """Return the factor of the loss, which makes one micro-batch of one rank overflow."""
        if self.program.overflow is None:
            return 1.0
        where, which, rank = self.program.overflow
        here = step, micro_batch, world.rank
        return float("inf") if here == (where, which, rank % world.world_size) else 1.0

    def after(self, run, ended):
        """Do what follows the training in a body: save, stop."""
        kind, step = self.stop or (None, 0)
        if kind == "late crash" and (run.step > step or (run.step == step and not ended)):
            raise Crash
        if ended:
            self.rates += rates_of(self.optimizers)
            if run.step in self.program.saves:
                run.save()
            if run.step == step and kind == "crash":
                raise Crash
            if run.step == step and kind == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)

    def body(self, points, factor):
        program, opened = self.program, self.session
        if program.loop == CLOSURE:
            self.by_closure(points)
            return
        found = {name: loss * factor for name, loss in losses(self.models, points).items()}
        if program.loop == SHORT:
            opened.step(found["1"])
            self.tick(0)
            return
        calls = program.loop.split()
        passes = max(place for place, call in enumerate(calls) if call[0] in "BR")
        for place, call in enumerate(calls):
            kind, name = call[0], call[1:]
            which = "dg".index(name) if name in ("d", "g") else 0
            if program.gated and place > passes and not opened.sync_gradients:
                break
            if kind == "B":
                opened.backward(found[name], retain_graph=len(self.models) == 1)
            elif kind == "R":
                opened.backward(0.25 * found[name], retain_graph=True)
                opened.backward(0.75 * found[name], retain_graph=True)
            elif kind == "Z":
                self.optimizers[which].zero_grad()
            else:
                self.step(which)

    def step(self, which):
        program, opened = self.program, self.session
        if program.clip == "call":
            norm = opened.clip_grad_norm_(self.models[which].parameters(), MAX_NORM)
            assert (norm is not None) is opened.sync_gradients
            self.norms[which] += [] if norm is None else [norm.item()]
        if program.ticks == "before":
            tick(self.schedulers[which : which + 1])
        self.optimizers[which].step()
        self.tick(which)

    def tick(self, which):
        if self.program.ticks == "after" or (
            self.program.ticks == "gated" and self.session.sync_gradients
        ):
            tick(self.schedulers[which : which + 1])

    def by_closure(self, points):
        (optimizer,) = self.optimizers

        def closure():
            optimizer.zero_grad()
            loss = losses(self.models, points)["1"]
            self.session.backward(loss)
            return loss

        optimizer.step(closure)
        self.tick(0)


def start(program, folder, backend="auto", stop=None, resume=False):
    """Train in a session to the end or to a stop; return the outcome, None after a stop."""
    options = {"precision": "fp64"}
    if program.overflow is not None:
        options = {"precision": "fp16", "loss_scale": 128, "max_nonfinite": 99}
    if program.clip == "option":
        options["clip_norm"] = MAX_NORM
    if stop is not None and stop[0] == "max_steps":
        options["max_steps"] = stop[1]
    if program.stops:
        options["deterministic"] = True
    if program.every is not None:
        options["checkpoint_every"] = program.every
    done = None
    try:
        with hpctrain.Session(
            backend=backend,
            batch_size=program.samples,
            accumulate=program.accumulate,
            epochs=len(program.epochs),
            run_dir=str(folder),
            resume=resume,
            **options,
        ) as opened:
            done = Loop(program, opened, stop).train()
    except Crash:
        return None
    except SystemExit:
        assert stop is not None
        assert stop[0] == "signal"
        return None
    return done


def trained(program, folder, backend="auto"):
    """Return the outcomes of an undisturbed run, and of one with the stops of the program."""
    whole = start(program, folder / "whole", backend)
    if not program.stops:
        return whole, whole
    for number, stop in enumerate(program.stops):
        start(program, folder / "cut", backend, stop, resume=number > 0)
    return whole, start(program, folder / "cut", backend, resume=True)


# --- Programs ----------------------------------------------------------------------------------


@st.composite
def epochs(draw, accumulate, skips):
    """Draw the bodies of an epoch that has at least one step."""
    steps, rest = draw(st.integers(1, 3)), draw(st.integers(0, accumulate - 1))
    bodies = ["."] * (steps * accumulate + rest)
    kind, at = draw(st.sampled_from("..bB")), draw(st.integers(0, len(bodies)))
    if kind == "b" and accumulate <= at < len(bodies):
        bodies[at] = "b"
    if kind == "B" and accumulate < at:
        bodies[at - 1] = "B"
    if skips:
        for place in draw(st.lists(st.integers(0, len(bodies)), max_size=2)):
            bodies.insert(place, "s")
    return "".join(bodies)


@st.composite
def adversaries(draw):
    """Draw the body of a GAN, in which all losses are computed before any step."""
    calls = draw(st.sampled_from(("Bd Bg Sd Sg", "Bd Bg Sg Sd", "Bg Sg Bd Sd", "Bg Bd Sg Sd")))
    calls = calls.split()
    for name in ("Zd", "Zg", *draw(st.lists(st.sampled_from(("Zd", "Zg")), max_size=2))):
        calls.insert(draw(st.integers(0, len(calls))), name)
    return " ".join(calls)


def usable(loop):
    """Check that each optimizer steps by some loss, and by nothing of an earlier body."""
    found = parts(loop)
    return all(found) and all(max(one.values()) == 1 for one in found) and "g" in found[-1]


def accumulates(loop):
    """Check whether the sum over all backward passes of a step is what the optimizers get."""
    passes = Counter("".join(call[1:] for call in loop.split() if call[0] in "BR"))
    if "Bd" not in loop:
        return loop in (SHORT, CLOSURE) or parts(loop) == [passes]
    return parts(loop) == [passes, Counter("g")]


@st.composite
def programs(draw):
    """Draw a program."""
    kind = draw(st.sampled_from([SHORT, "calls", "calls", "calls", ADVERSARIES, CLOSURE]))
    accumulate = 1 if kind == CLOSURE else draw(st.integers(1, 4))
    loop, gated, ticks = kind, False, ["after", "gated", "epoch"]
    if kind == "calls":
        loop, gated = draw(st.sampled_from(BODIES)), draw(st.booleans())
        ticks.append("before")
    elif kind == ADVERSARIES:
        loop = draw(adversaries().filter(usable))
        ticks.append("before")
    if accumulate > 1 and not (ACCUMULATED_DISCARDS or accumulates(loop)):
        accumulate = 1
    if accumulate > 1 and not (gated or ACCUMULATED_SCHEDULES):
        ticks = ["gated", "epoch"]
    clips = [None, None]
    if kind != CLOSURE or CLIPPED_CLOSURES:
        clips.append("option")
    if kind in ("calls", ADVERSARIES):
        clips.append("call")
    few = [draw(epochs(accumulate, kind != ADVERSARIES)) for _ in range(draw(st.integers(1, 3)))]
    names = st.sampled_from(("SGD", "AdamW"))
    program = Program(
        seed=draw(st.integers(0, 99)),
        samples=draw(st.integers(1, 3)),
        accumulate=accumulate,
        epochs=tuple(few),
        loop=loop,
        gated=gated,
        optimizers=tuple(draw(names) for _ in range(2 if kind == ADVERSARIES else 1)),
        clip=draw(st.sampled_from(clips)),
        schedule=draw(st.sampled_from((None, *SCHEDULES))),
        ticks=draw(st.sampled_from(ticks)),
        early=draw(st.booleans()),
    )
    program = draw(interruptions(program))
    fits = all(len(bodies) % accumulate == 0 for bodies in program.epochs)
    return replace(program, stream=fits and draw(st.booleans()))


@st.composite
def interruptions(draw, program):
    """Draw what disturbs a program: an overflow, or stops after which it is resumed."""
    steps = program.steps()
    if draw(st.integers(0, 3)) == 0 and len(program.optimizers) == 1 and program.loop != CLOSURE:
        place = st.integers(0, steps - 1), st.integers(0, program.accumulate - 1)
        overflow = (*(draw(one) for one in place), draw(st.integers(0, 1)))
        program = replace(program, overflow=overflow, optimizers=("SGD",))
    if steps < 2 or not draw(st.booleans()):
        return program
    kinds = ["crash", "late crash", "max_steps"]
    at = sorted(draw(st.sets(st.integers(1, steps - 1), min_size=1, max_size=2)))
    stops = [(draw(st.sampled_from(kinds)), step) for step in at]
    if draw(st.booleans()):
        stops[-1] = "signal", at[-1]  # the last one, because the run may go on for some steps
    return replace(
        program,
        epochs=tuple(map(program.resumable, range(len(program.epochs)))),
        stops=tuple(stops),
        every=draw(st.sampled_from((None, 1, 2, 3))),
        saves=frozenset(draw(st.sets(st.integers(1, steps), max_size=2))),
    )
