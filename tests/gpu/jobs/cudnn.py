"""Convolutions, batch normalisation and a recurrent layer: cuDNN and cuBLAS."""

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    device = options.device
    picture = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, stride=2, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(2),
    ).to(device)
    sequence = torch.nn.GRU(16, 32, batch_first=True).to(device)
    head = torch.nn.Linear(32, 2).to(device)
    parts = torch.nn.ModuleList([picture, sequence, head])
    optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)
    for step in run.steps():
        points, classes = (part.to(device) for part in common.batch(torch, step))
        answers, _ = sequence(picture(points.view(-1, 1, 16, 16)))
        loss = torch.nn.functional.cross_entropy(head(answers[:, -1]), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.say(step, loss.item())
    run.end(weights=common.torch_digest(torch, parts.state_dict(), optimizer.state_dict()))


if __name__ == "__main__":
    main()
