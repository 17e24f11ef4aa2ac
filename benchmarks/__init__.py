"""taskmesh and its peers doing the same work on one machine: `python -m benchmarks.tasks`, see README.md."""
