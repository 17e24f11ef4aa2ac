"""Outcomes on their way back: pushed to whoever waits, and kept as records for a while."""
