"""A training through Hugging Face's Accelerator, with gradients accumulated over two batches."""

import common

BATCH = 64


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    from accelerate import Accelerator

    run = common.Run(options)
    accelerator = Accelerator(cpu=options.device == "cpu", gradient_accumulation_steps=2)
    network = common.perceptron(torch, "cpu")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    points, classes = common.batch(torch, 0, options.steps * BATCH)
    data = torch.utils.data.TensorDataset(points, classes)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for step, (points, classes) in zip(run.steps(), loader):
        with accelerator.accumulate(network):
            loss = torch.nn.functional.cross_entropy(network(points), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.say(step, loss.item())
    weights = accelerator.unwrap_model(network).state_dict()
    run.end(weights=common.torch_digest(torch, weights))


if __name__ == "__main__":
    main()
