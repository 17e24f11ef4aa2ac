"""How gradients are made small for the way to the master."""

from taskmesh.training.compression.base import Compression
from taskmesh.training.compression.none import NoCompression
from taskmesh.training.compression.quantize import Int8

__all__ = ["Compression", "Int8", "NoCompression"]
