"""Measured programs. Without a GPU a small PyTorch training replaces each, to test the script."""

import collections.abc
import dataclasses
import functools

from . import catalog, programs

COUNTER, CHURN, HOG = "examples/counter.cu", "tests/gpu/jobs/churn.cu", "tests/gpu/jobs/hog.cu"
HALVES, ALLOCATE = "tests/gpu/jobs/halves.cu", "tests/gpu/jobs/allocate.cu"
# Lines that ALLOCATE prints.
ALLOCATED = (
    "pairs 2 200 2.50 1.50 plain",
    "pairs 64 200 9.00 8.00 plain",
    "kept 64 128 9.00 8.00 plain",
)
# Only this many bits of each word are used: an image is about a quarter of the memory.
NARROW = ("-DCOUNTER_BITS=16",)
ENDLESS = 10**9
# In a program's own folder: the program ends when the file exists.
ENOUGH = "enough"


@dataclasses.dataclass(frozen=True)
class Subject:
    """`words(steps, pace_ms)` returns its command. `ends`: it ends by itself once ENOUGH exists."""

    name: str
    gib: float
    words: collections.abc.Callable
    ends: bool = False

    def endless(self, pace_ms):
        return self.words(ENDLESS, pace_ms)


def counter(context, gib, narrow=False):
    """One allocation of this size; prints a checksum of all of it in each step."""
    if context.tools.device == "cpu":
        return dataclasses.replace(big(context, gib), name=f"stand-in {gib:g}")
    program = build(context, COUNTER, "narrow" if narrow else "counter", NARROW if narrow else ())
    name = f"counter {gib:g} GiB{' (packs)' if narrow else ''}"
    return Subject(name, gib, lambda steps, pace_ms: [program, gib, steps, pace_ms])


def churn(context, gib):
    """Two threads that allocate and free all the time; prints a checksum of all in each step."""
    if context.tools.device == "cpu":
        return dataclasses.replace(big(context, gib), name=f"stand-in {gib:g}")
    program = build(context, CHURN, "churn")
    return Subject(
        f"churn {gib:g} GiB",
        gib,
        lambda steps, pace_ms: [program, gib, steps, pace_ms, ENOUGH],
        ends=True,
    )


def halves(context, gib, kind):
    """The counter with one half of its memory of a kind that the agent does not cover; its lines are equal."""
    if context.tools.device == "cpu":
        return dataclasses.replace(big(context, gib), name=f"stand-in half {kind} {gib:g}")
    program = build(context, HALVES, "halves")
    return Subject(
        f"halves {gib:g} GiB, {kind}",
        gib,
        lambda steps, pace_ms: [program, kind, gib, steps, pace_ms],
    )


def allocate(context):
    """Command that measures allocations, and ends by itself."""
    if context.tools.device == "cpu":
        return ["printf", "%s\n", *ALLOCATED]
    return [build(context, ALLOCATE, "allocate")]


def big(context, gib):
    """PyTorch training; prints the loss of each step, and a checksum of its whole state now and then."""
    return pytorch(context, "big.py", f"training {gib:g} GiB", gib)


def served(context, gib):
    """Memory of which a hundredth changes; prints a checksum of the changes in each step, and of all now and then."""
    return pytorch(context, "served.py", f"served {gib:g} GiB", gib)


def lora(context, gib):
    """Fine-tuning of adapters beside frozen weights; prints the loss of each step, and a checksum of all now and then."""
    return pytorch(context, "lora.py", f"LoRA {gib:g} GiB", gib)


def pytorch(context, script, name, gib):
    """A job of PyTorch that takes its size as an option."""
    fixed = [context.tools.python, catalog.JOBS / script, "--device", context.tools.device]
    return Subject(
        name,
        gib,
        lambda steps, pace_ms: [*fixed, "--gib", gib, "--steps", steps, "--ms-per-step", pace_ms],
    )


@functools.cache
def build(context, source, name, flags=()):
    return programs.build(source, context.work / "programs", name, flags)


def missing(context):
    """Returns a missing requirement of the CUDA programs, or None."""
    return None if context.tools.device == "cpu" else programs.missing("cuda")
