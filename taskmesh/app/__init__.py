"""The Mesh and its tasks: what a user writes against."""
