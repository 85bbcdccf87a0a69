"""Training from a DataLoader whose workers are forked after CUDA is in use."""

import common

torch = common.prepare_torch()

BATCH = 64
STEPS_PER_EPOCH = 50


class Points(torch.utils.data.Dataset):
    """Random points, each from its own seed; the class is the sign of their sum."""

    def __len__(self):
        return BATCH * STEPS_PER_EPOCH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(common.WIDTH, generator=generator)
        return point, (point.sum() > 0).long()


def add(parser):
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--persistent", action="store_true", help="workers live across epochs")
    parser.add_argument("--pin", action="store_true", help="a thread pins host memory")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork")


def endless(loader):
    """Yields batches, epoch after epoch."""
    while True:
        yield from loader


def main():
    options = common.parse(__doc__, add)
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(
        Points(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=options.workers,
        prefetch_factor=2,
        persistent_workers=options.persistent,
        pin_memory=options.pin and options.device == "cuda",
        multiprocessing_context=options.start,
        generator=torch.Generator().manual_seed(1),
    )
    for step, (points, classes) in zip(run.steps(), endless(loader)):
        points = points.to(options.device, non_blocking=options.pin)
        classes = classes.to(options.device, non_blocking=options.pin)
        loss = torch.nn.functional.cross_entropy(network(points), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.say(step, loss.item())
    run.end(weights=common.torch_digest(torch, network.state_dict(), optimizer.state_dict()))


if __name__ == "__main__":
    main()
