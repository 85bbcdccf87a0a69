"""Training that saves its state periodically: a temporary file is renamed when it is complete."""

import contextlib
import os

import common

EVERY = 20
KEEP = 2


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    kept = []

    def after(step, _loss):
        if (step + 1) % EVERY:
            return
        state = {"step": step, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
        path = f"state-{step}.pt"
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        kept.append(path)
        for old in kept[:-KEEP]:
            # After a crash a file that was removed after the image is removed again.
            with contextlib.suppress(FileNotFoundError):
                os.remove(old)
        del kept[:-KEEP]

    common.train(run, network, optimizer, torch, after)
    saved = [torch.load(path, map_location="cpu") for path in kept]
    run.end(
        weights=common.torch_digest(torch, network.state_dict()),
        saved=common.torch_digest(torch, saved),
        files=" ".join(sorted(name for name in os.listdir(".") if name.startswith("state-"))),
    )


if __name__ == "__main__":
    main()
