"""Training over a Mesh: any process may die at any instant, and the run goes on without counting anything twice."""

from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.retention import Every
from taskmesh.training.commit import LedgerEntry
from taskmesh.training.compression import Compression, Int8, NoCompression
from taskmesh.training.data import Dataset
from taskmesh.training.master import Finished
from taskmesh.training.modes import LocalSteps, Synchronous
from taskmesh.training.rollback import OnDivergence
from taskmesh.training.trainer import Trainer, accuracy

__all__ = [
    "Compression",
    "Dataset",
    "Every",
    "Finished",
    "Int8",
    "LedgerEntry",
    "LocalSteps",
    "Manifest",
    "NoCompression",
    "OnDivergence",
    "Synchronous",
    "Trainer",
    "accuracy",
]
