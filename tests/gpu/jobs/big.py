"""A large model trained with AdamW, and a checksum of weights and optimizer now and then.

--gib counts weights, gradients and both moments of AdamW, in float32. On a CPU it is a small part of
that, for testing a script.
"""

import common

BATCH = 512
WIDTH = 8192
# Without a GPU: share of the memory, and the corresponding width.
CPU_SHARE = 1 / 1024
CPU_WIDTH = 256
# Weight, gradient and two moments of a parameter.
BYTES_PER_PARAMETER = 16
# Steps from one checksum to the next.
CHECK_STEPS = 50
# Number of words summed at a time, because their products take memory.
SUM_WORDS = 1 << 24


def network(torch, device, gib):
    """Returns as many square layers as there is memory for, created in place."""
    gib, width = (gib * CPU_SHARE, CPU_WIDTH) if device == "cpu" else (gib, WIDTH)
    layers = max(1, round(gib * 2**30 / BYTES_PER_PARAMETER / width**2))
    with torch.device(device):
        body = [
            part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU())
        ]
        return torch.nn.Sequential(*body, torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)), width


def checksum(torch, tensors, factors):
    """Returns an exact checksum of every word and its position, equal in every run."""
    total = torch.zeros((), dtype=torch.int64, device=factors.device)
    for tensor in tensors:
        for part in tensor.detach().view(-1).view(torch.int32).split(SUM_WORDS):
            total = total * 31 + (part.long() * factors[: len(part)]).sum()
    return f"{total.item() & (2**64 - 1):016x}"


def main():
    options = common.parse(
        __doc__, lambda parser: parser.add_argument("--gib", type=float, default=17)
    )
    torch = common.prepare_torch()
    torch.backends.cuda.matmul.allow_tf32 = True
    run, device = common.Run(options), options.device
    model, width = network(torch, device, options.gib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    random = torch.Generator(device=device).manual_seed(1)
    largest = max(parameter.numel() for parameter in model.parameters())
    factors = torch.arange(min(SUM_WORDS, largest), device=device) * 2 + 1

    def state():
        moments = (moment for of in optimizer.state.values() for moment in of.values())
        tensors = [*model.parameters(), *(moment.to(device) for moment in moments)]
        return checksum(torch, tensors, factors)

    for step in run.steps():
        points = torch.randn(BATCH, width, device=device, generator=random)
        loss = (model(points) - points[:, :1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.say(step, loss.item())
        if (step + 1) % CHECK_STEPS == 0:
            run.line(f"state {step} {state()}")
    if device == "cuda":
        common.warn(f"big.py: {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB reserved")
    run.end(state=state())


if __name__ == "__main__":
    main()
