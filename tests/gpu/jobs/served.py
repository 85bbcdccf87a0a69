"""Memory as of a model that is served: much of it never changes, and a hundredth does in every step, spread all over."""

import common

# Words of 4 bytes in a row: 256 KiB.
ROW_WORDS = 64 << 10
ROWS_PER_GIB = 4096
# One row of as many changes.
CHANGED = 100
# Number of different words: an image takes about a quarter of the memory, so that several fit the disk.
WORDS = 1 << 8
# Without a GPU: share of the memory.
CPU_SHARE = 1 / 1024
CHECK_STEPS = 100


def main():
    options = common.parse(
        __doc__, lambda parser: parser.add_argument("--gib", type=float, default=64)
    )
    torch = common.prepare_torch()
    run, device = common.Run(options), options.device
    gib = options.gib * (CPU_SHARE if device == "cpu" else 1)
    random = torch.Generator(device=device).manual_seed(1)
    left, tensors = max(CHANGED, int(gib * ROWS_PER_GIB)), []
    while left:
        rows = min(left, ROWS_PER_GIB)
        shape = (rows, ROW_WORDS)
        tensors.append(
            torch.randint(0, WORDS, shape, dtype=torch.int32, device=device, generator=random)
        )
        left -= rows

    def checksum(of):
        total = torch.zeros((), dtype=torch.int64, device=device)
        for part in of:
            total = total * 31 + part.sum(dtype=torch.int64)
        return total.item()

    def state():
        return checksum(row for tensor in tensors for row in tensor.split(256))

    for step in run.steps():
        changed = [tensor[::CHANGED] for tensor in tensors]
        for rows in changed:
            rows.mul_(25173).add_(13849 + step).bitwise_and_(WORDS - 1)
        run.line(f"{step} {checksum(changed)}")
        if (step + 1) % CHECK_STEPS == 0:
            run.line(f"state {step} {state()}")
    run.end(state=state())


if __name__ == "__main__":
    main()
