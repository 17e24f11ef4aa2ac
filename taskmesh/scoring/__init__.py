"""Scoring over a Mesh: rows in, scores out, with models from training runs."""

from taskmesh.scoring.models import RunModel, from_run
from taskmesh.scoring.stream import Scorer, scorer

__all__ = ["RunModel", "Scorer", "from_run", "scorer"]
