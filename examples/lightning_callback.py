"""A callback for PyTorch Lightning: a snapshot after each validation.

    trainer = lightning.Trainer(callbacks=[SnapshotAfterValidation()])

Without ckpt-run it does nothing. Scheduled snapshots continue beside it; `--interval never` leaves these alone.
"""

import ckpt_run
from lightning.pytorch.callbacks import Callback


class SnapshotAfterValidation(Callback):
    """Requests a snapshot where the least work is lost; logs each restore."""

    def setup(self, trainer, pl_module, stage):
        """Logs each restore of the job."""
        ckpt_run.on_restore(lambda restored: print(f"restored from image {restored.image}", flush=True))

    def on_validation_end(self, trainer, pl_module):
        """Requests a snapshot from one process: it holds all of the job's."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            ckpt_run.snapshot()
