"""Runs jobs under ckpt-run on a real GPU, kills them, and compares what they made with uninterrupted runs."""
