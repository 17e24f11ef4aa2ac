"""How gradients are made small for the way to the master."""

from taskmesh.training.compression.base import Compression, Memory
from taskmesh.training.compression.dgc import DGC
from taskmesh.training.compression.half import Half
from taskmesh.training.compression.lowrank import LowRank
from taskmesh.training.compression.none import NoCompression
from taskmesh.training.compression.quantize import Int8
from taskmesh.training.compression.topk import TopK

__all__ = ["DGC", "Compression", "Half", "Int8", "LowRank", "Memory", "NoCompression", "TopK"]
