"""What a worker does for a run: compute shards, alone or in a group of ranks, and send them; reduce; remember."""
