"""Versions of a run: immutable chunks, a manifest each, a pointer that flips last, a lease that fences writers."""
