"""What a step would take with a thousand workers: a model fitted on this machine, and what it predicts."""
