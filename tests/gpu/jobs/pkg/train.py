"""A plain training, for `python -m pkg.train` and for shell lines around it."""

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    common.train(run, network, optimizer, torch)
    run.end(weights=common.torch_digest(torch, network.state_dict(), optimizer.state_dict()))


if __name__ == "__main__":
    main()
