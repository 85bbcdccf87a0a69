"""A callback for the Trainer of Hugging Face: a snapshot after each epoch.

    trainer = transformers.Trainer(..., callbacks=[SnapshotAfterEpoch()])

Without ckpt-run it does nothing. Scheduled snapshots continue beside it; `--interval never` leaves these alone.
"""

import ckpt_run
from transformers import TrainerCallback


class SnapshotAfterEpoch(TrainerCallback):
    """Requests a snapshot where the least work is lost; logs each restore."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Logs each restore of the job."""
        ckpt_run.on_restore(lambda restored: print(f"restored from image {restored.image}", flush=True))

    def on_epoch_end(self, args, state, control, **kwargs):
        """Requests a snapshot from one process: it holds all of the job's."""
        if state.is_world_process_zero:
            ckpt_run.snapshot()
