"""Trainings on data that every machine has; docs/examples.md tells how to run them."""
