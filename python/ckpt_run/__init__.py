"""Functions for a job that runs under ckpt-run.

Without ckpt-run every function does nothing: a program that uses them runs anywhere. Nothing here is needed for
snapshots and restores, which work with programs that know nothing of ckpt-run.
"""

from ._job import Restored, SnapshotError, is_supervised, on_restore, postpone, restored, snapshot

__all__ = ["Restored", "SnapshotError", "is_supervised", "on_restore", "postpone", "restored", "snapshot"]
