"""Processes that each begin to use PyTorch on the GPU, one after the other: cuBLAS starts in the first step.

Before it, each creates the file `ready` and waits for a random time, so that a snapshot which is requested then falls
into the step. Prints a line for each process: its first result, or the error.
"""

import argparse
import os
import random
import time

WAIT_SECONDS_MAX = 0.7


def first_step(torch, number):
    """Returns the result of the first step in this process."""
    torch.manual_seed(number)
    layer = torch.nn.Linear(256, 1024).to("cuda")
    points = torch.randn(64, 256).to("cuda")
    torch.cuda.synchronize()
    with open("ready", "w", encoding="ascii"):
        pass
    time.sleep(random.Random(number).uniform(0, WAIT_SECONDS_MAX))
    answer = layer(points)
    return (answer @ answer.T).sum().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, required=True)
    count = parser.parse_args().processes
    # Once, as it takes longer than all the rest.
    import torch

    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                print(number, float(first_step(torch, number)).hex(), flush=True)
            except RuntimeError as error:
                print(number, "failed:", str(error).splitlines()[0], flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
