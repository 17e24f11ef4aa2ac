"""A run's past: versions formed again from a checkpoint and the ledger."""
