"""torch.compile: inductor and Triton, with their caches and compile workers, in the job's folder."""

import os

import common

# Read when torch is imported.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("inductor")
os.environ["TRITON_CACHE_DIR"] = os.path.abspath("triton")


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):  # PyTorch 2.10: no choice of kernels by their speed
        inductor.deterministic = True
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    common.train(run, torch.compile(network), optimizer, torch)
    run.end(weights=common.torch_digest(torch, network.state_dict()))


if __name__ == "__main__":
    main()
