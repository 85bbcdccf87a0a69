"""A training by PyTorch Lightning, whose Trainer imports mpi4py: MPI_Init starts Open MPI's orted beside it."""

import os

import common

BATCH = 64


def main():
    # One machine: without this, MPI_Init fails where there is no ssh.
    os.environ.setdefault("OMPI_MCA_plm", "isolated")
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import lightning
    from mpi4py import MPI

    run = common.Run(options)
    steps = run.steps()
    network = common.perceptron(torch, "cpu")
    points, classes = common.batch(torch, 0, options.steps * BATCH)
    data = torch.utils.data.TensorDataset(points, classes)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network

        def training_step(self, batch, _number):
            step = next(steps)
            loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            run.say(step, loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)
    # The pause after the last step.
    next(steps, None)
    ranks = MPI.COMM_WORLD.Get_size()
    run.end(weights=common.torch_digest(torch, network.cpu().state_dict()), ranks=ranks)


if __name__ == "__main__":
    main()
