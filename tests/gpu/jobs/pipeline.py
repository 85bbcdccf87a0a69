"""One process that trains a model whose layers lie on all GPUs, as Transformers' `device_map="auto"` places them."""

import common

LAYERS_PER_GPU = 2


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    on_gpu = options.device == "cuda"
    devices = (
        [f"cuda:{number}" for number in range(torch.cuda.device_count())] if on_gpu else ["cpu"]
    )
    layers = torch.nn.ModuleList(
        torch.nn.Linear(common.WIDTH, common.WIDTH).to(device)
        for device in devices
        for _ in range(LAYERS_PER_GPU)
    )
    last = torch.nn.Linear(common.WIDTH, 2).to(devices[-1])
    optimizer = torch.optim.AdamW([*layers.parameters(), *last.parameters()], lr=1e-3)
    for step in run.steps():
        points, classes = common.batch(torch, step)
        for layer in layers:
            points = torch.nn.functional.gelu(layer(points.to(layer.weight.device)))
        loss = torch.nn.functional.cross_entropy(last(points), classes.to(last.weight.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.say(step, loss.item())
    run.end(weights=common.torch_digest(torch, layers.state_dict(), last.state_dict()))


if __name__ == "__main__":
    main()
