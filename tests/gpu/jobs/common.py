"""Shared parts of the jobs: options, pace, and the result for the comparison of two runs.

A job prints one line a step, flushed, and at its end writes all lines and digests of its state to
the result file. All are the same in every run with the same --steps, whatever the pace. No job
knows anything of ckpt-run.
"""

import argparse
import hashlib
import os
import sys
import time

# Read by cuBLAS and XLA at their start, so set before any of them is imported.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WIDTH = 256


def parse(doc, add=lambda parser: None):
    """The options of every job, and those that `add` adds."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--ms-per-step", type=int, default=100, help="pause after each step")
    parser.add_argument("--result", default="result.txt", help="written at the end")
    parser.add_argument("--times", help="written at the end: milliseconds that each step took")
    add(parser)
    return parser.parse_args()


class Run:
    """Steps at a pace, and their results."""

    def __init__(self, options):
        self.options = options
        self.lines = []
        self.times = []

    def steps(self):
        """Yields 0, 1, … with the pause after each."""
        for step in range(self.options.steps):
            before = time.monotonic()
            yield step
            self.pause()
            self.times.append((time.monotonic() - before) * 1000)

    def pause(self):
        time.sleep(self.options.ms_per_step / 1000)

    def say(self, step, number):
        self.line(f"{step} {float(number).hex()}")

    def line(self, text):
        self.lines.append(text)
        print(text, flush=True)

    def end(self, **digests):
        """Writes the result."""
        lines = self.lines + [f"{name} {value}" for name, value in digests.items()]
        write(self.options.result, lines)
        if self.options.times:
            write(self.options.times, [f"{time:.1f}" for time in self.times])


def write(path, lines):
    with open(path, "w", encoding="ascii") as file:
        file.writelines(f"{line}\n" for line in lines)


def digest(*arrays):
    """Returns the SHA-256 over the bytes of numpy arrays."""
    result = hashlib.sha256()
    for array in arrays:
        result.update(array.tobytes())
    return result.hexdigest()


def prepare_torch():
    """Returns PyTorch, seeded and deterministic."""
    import torch

    torch.manual_seed(0)
    # Operations without a deterministic version only warn: the comparison shows if it mattered.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    return torch


def join_group(torch, kind):
    """Joins torchrun's process group: NCCL with one GPU a rank, gloo without GPUs. Returns the rank's device."""
    import torch.distributed as group

    if kind != "cuda":
        group.init_process_group("gloo")
        return "cpu"
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    group.init_process_group("nccl", device_id=torch.device(device))
    return device


def perceptron(torch, device):
    """A small network; its dropout uses the device's random numbers."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(4 * WIDTH, 2),
    ).to(device)


def batch(torch, step, size=64):
    """Returns points and classes of a step."""
    points = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))
    return points, (points.sum(1) > 0).long()


def torch_digest(torch, *things):
    """Returns the SHA-256 over all tensors in state dictionaries, lists and the like, in their order."""

    def arrays(thing):
        if isinstance(thing, torch.Tensor):
            yield thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        elif isinstance(thing, dict):
            for value in thing.values():
                yield from arrays(value)
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                yield from arrays(value)

    return digest(*arrays(things))


def train(run, network, optimizer, torch, after=lambda step, loss: None):
    """The plain loop of which most jobs are a variation."""
    device = run.options.device
    for step in run.steps():
        points, classes = (part.to(device) for part in batch(torch, step))
        loss = torch.nn.functional.cross_entropy(network(points), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.say(step, loss.item())
        after(step, loss.item())


def warn(text):
    print(text, file=sys.stderr, flush=True)
