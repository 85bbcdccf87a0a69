"""A training with a progress bar, a CSV log that stays open and a TensorBoard log, where these are installed."""

import csv
import glob
import hashlib

import common


def bar(steps):
    """A progress bar on stderr."""
    try:
        import tqdm
    except ImportError:
        return None
    return tqdm.tqdm(total=steps)


def board(folder):
    """A TensorBoard log."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder)


def board_steps(folder):
    """Returns the steps in the log; TensorBoard opens its file again for each write, so some may occur twice."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps = [
        event.step
        for path in sorted(glob.glob(f"{folder}/events*"))
        for event in EventFileLoader(path).Load()
        if event.HasField("summary")
    ]
    if len(steps) > len(set(steps)):
        common.warn(
            f"progress.py: {len(steps) - len(set(steps))} steps twice in the TensorBoard log"
        )
    return len(set(steps))


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    progress, summary = bar(options.steps), board("board")
    with open("log.csv", "w", newline="", encoding="ascii") as file:
        table = csv.writer(file)
        table.writerow(["step", "loss"])

        def after(step, loss):
            table.writerow([step, loss])
            file.flush()
            if progress:
                progress.update()
                progress.set_postfix(loss=loss)
            if summary:
                summary.add_scalar("loss", loss, step)

        common.train(run, network, optimizer, torch, after)
    if progress:
        progress.close()
    if summary:
        summary.close()
    with open("log.csv", "rb") as file:
        log = hashlib.sha256(file.read()).hexdigest()
    steps = board_steps("board") if summary else 0
    run.end(weights=common.torch_digest(torch, network.state_dict()), log=log, board_steps=steps)


if __name__ == "__main__":
    main()
