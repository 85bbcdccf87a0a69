"""A training that stops for good after some steps, unless a file exists, which it creates before."""

import os
import time

import common

# Matrix multiplications per step, so that the GPU shows activity; and the matrices.
PRODUCTS, SIZE = 24, 4096
CPU_SIZE = 64


def add(parser):
    parser.add_argument("--at", type=int, required=True, help="the step after which it stops")
    parser.add_argument("--once", required=True, help="the file")


def main():
    options = common.parse(__doc__, add)
    torch = common.prepare_torch()
    run = common.Run(options)
    size = SIZE if options.device == "cuda" else CPU_SIZE
    random = torch.Generator().manual_seed(1)
    factor, state = (
        torch.randn(size, size, generator=random).to(options.device) / size**0.5 for _ in range(2)
    )
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def after(step, _loss):
        nonlocal state
        for _ in range(PRODUCTS):
            state = torch.tanh(factor @ state * 2)
        if step == options.at and not os.path.exists(options.once):
            with open(options.once, "w", encoding="ascii"):
                pass
            if options.device == "cuda":
                torch.cuda.synchronize()
            while True:
                time.sleep(3600)

    common.train(run, network, optimizer, torch, after)
    run.end(weights=common.torch_digest(torch, network.state_dict(), state))


if __name__ == "__main__":
    main()
