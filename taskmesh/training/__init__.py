"""Training over a Mesh: any process may die at any instant, and the run goes on without counting anything twice."""

from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.retention import Every
from taskmesh.training.compression import DGC, Compression, Half, Int8, LowRank, NoCompression, TopK
from taskmesh.training.data import Dataset
from taskmesh.training.execution import Execution
from taskmesh.training.ledger import LedgerEntry
from taskmesh.training.master.lead import Finished
from taskmesh.training.modes import Asynchronous, LocalSteps, Synchronous
from taskmesh.training.past.history import Formed, Replayed, Turned
from taskmesh.training.reader import accuracy
from taskmesh.training.robust import Mean, Median, TrimmedMean
from taskmesh.training.rollback import OnDivergence
from taskmesh.training.trainer import Trainer
from taskmesh.training.validation import Validate

__all__ = [
    "DGC",
    "Asynchronous",
    "Compression",
    "Dataset",
    "Every",
    "Execution",
    "Finished",
    "Formed",
    "Half",
    "Int8",
    "LedgerEntry",
    "LocalSteps",
    "LowRank",
    "Manifest",
    "Mean",
    "Median",
    "NoCompression",
    "OnDivergence",
    "Replayed",
    "Synchronous",
    "TopK",
    "Trainer",
    "TrimmedMean",
    "Turned",
    "Validate",
    "accuracy",
]
