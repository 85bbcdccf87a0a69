"""PyTorch job for tests of ckpt-run: a small, deterministic training run.

Writes one line per step, the loss as an exact hexadecimal float, to stdout and to
the log file (opened in mode "w", as in most programs), and at the end the SHA-256
of the weights. Two runs with the same arguments write the same bytes. The job
keeps no checkpoints and has no code for ckpt-run.
"""

import argparse
import hashlib
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its start

import torch
from torch.utils.data import DataLoader, Dataset

FEATURES = 256
WIDTH = 2048


class Points(Dataset):
    """Random points, each from a seed of its own; the class is the sign of their sum."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        point = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return point, (point.sum() > 0).long()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", help="log file, overwritten")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--num-workers", type=int, default=0, help="DataLoader processes")
    parser.add_argument("--ms-per-step", type=int, default=50, help="pause after each step")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def model(device):
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 2),
    ).to(device)


def digest(network):
    """SHA-256 over names and bytes of all weights."""
    result = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        result.update(name.encode())
        result.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return result.hexdigest()


def main():
    arguments = parse()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    # CUDA is used before the workers are forked. This is the difficult order, on purpose.
    network = model(arguments.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    batches = DataLoader(
        Points(),
        batch_size=64,
        shuffle=True,
        num_workers=arguments.num_workers,
        generator=torch.Generator().manual_seed(1),
    )
    with open(arguments.log, "w", encoding="ascii") as log:

        def say(line):
            print(line, flush=True)
            print(line, file=log, flush=True)

        for step, (points, classes) in zip(range(arguments.steps), batches):
            points, classes = points.to(arguments.device), classes.to(arguments.device)
            loss = torch.nn.functional.cross_entropy(network(points), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(f"{step} {loss.item().hex()}")
            time.sleep(arguments.ms_per_step / 1000)
        say(f"weights sha256 {digest(network)}")


if __name__ == "__main__":
    main()
