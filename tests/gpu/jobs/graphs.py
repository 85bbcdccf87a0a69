"""A training step captured as a CUDA graph and replayed; without a GPU the step itself."""

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    device = options.device
    network = common.perceptron(torch, device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-2, momentum=0.9)
    points, classes = (part.to(device) for part in common.batch(torch, 0))

    def compute():
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(network(points), classes)
        loss.backward()
        optimizer.step()
        return loss

    replay = capture(torch, compute) if device == "cuda" else compute
    for step in run.steps():
        for target, source in zip((points, classes), common.batch(torch, step)):
            target.copy_(source)
        run.say(step, replay().item())
    run.end(weights=common.torch_digest(torch, network.state_dict()))


def capture(torch, compute):
    """Captures the step as a graph, after some runs on a separate stream, as PyTorch requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compute()

    def replay():
        graph.replay()
        return loss

    return replay


if __name__ == "__main__":
    main()
