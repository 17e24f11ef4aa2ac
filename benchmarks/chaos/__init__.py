"""The chaos run: real processes under a seeded schedule of faults, and an account of every message at the end."""
