"""Mixed precision: autocast and a GradScaler; float16 on a GPU, bfloat16 without one."""

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    device = options.device
    kind = torch.float16 if device == "cuda" else torch.bfloat16
    network = common.perceptron(torch, device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    # So large that the first steps overflow and are skipped: the scale is part of the state.
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=20)
    for step in run.steps():
        points, classes = (part.to(device) for part in common.batch(torch, step))
        with torch.autocast(device, dtype=kind):
            loss = torch.nn.functional.cross_entropy(network(points), classes)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.line(f"{step} {loss.item().hex()} {scaler.get_scale()}")
    run.end(weights=common.torch_digest(torch, network.state_dict(), optimizer.state_dict()))


if __name__ == "__main__":
    main()
