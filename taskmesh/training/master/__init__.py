"""What leads a run: order shards, collect them, take steps, commit versions, go back."""
