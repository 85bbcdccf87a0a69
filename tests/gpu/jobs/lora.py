"""Fine-tuning with LoRA: frozen weights in bfloat16, and a small adapter beside each layer, trained with AdamW.

--gib counts the frozen weights. On a CPU it is a small part of that, for testing a script.
"""

import big
import common

BATCH = 128
RANK = 16
WIDTH = 8192
# Without a GPU: share of the memory, and the corresponding width.
CPU_SHARE = 1 / 1024
CPU_WIDTH = 256
BYTES_PER_WEIGHT = 2
CHECK_STEPS = 50


def adapted(torch, width, device):
    """Returns a layer whose weights do not change, with its adapter."""

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            kind = {"device": device, "dtype": torch.bfloat16}
            self.frozen = torch.nn.Linear(width, width, bias=False, **kind).requires_grad_(False)
            self.down = torch.nn.Parameter(torch.randn(RANK, width, device=device) / width**0.5)
            self.up = torch.nn.Parameter(torch.zeros(width, RANK, device=device))

        def forward(self, inputs):
            low = inputs @ self.down.to(inputs.dtype).T
            change = self.frozen(inputs) + low @ self.up.to(inputs.dtype).T
            return inputs + torch.nn.functional.gelu(change)

    return Adapted()


def main():
    options = common.parse(
        __doc__, lambda parser: parser.add_argument("--gib", type=float, default=16)
    )
    torch = common.prepare_torch()
    run, device = common.Run(options), options.device
    on_cpu = device == "cpu"
    gib, width = (options.gib * CPU_SHARE, CPU_WIDTH) if on_cpu else (options.gib, WIDTH)
    count = max(1, round(gib * 2**30 / BYTES_PER_WEIGHT / width**2))
    model = torch.nn.Sequential(*(adapted(torch, width, device) for _ in range(count)))
    trained = [weights for weights in model.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not on_cpu)
    random = torch.Generator(device=device).manual_seed(1)
    factors = torch.arange(min(big.SUM_WORDS, width**2), device=device) * 2 + 1

    def state():
        moments = (moment for of in optimizer.state.values() for moment in of.values())
        tensors = [*model.parameters(), *(moment.to(device) for moment in moments)]
        return big.checksum(torch, tensors, factors)

    for step in run.steps():
        points = torch.randn(BATCH, width, device=device, generator=random).to(torch.bfloat16)
        loss = (model(points) - points.flip(1)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.say(step, loss.item())
        if (step + 1) % CHECK_STEPS == 0:
            run.line(f"state {step} {state()}")
    run.end(state=state())


if __name__ == "__main__":
    main()
