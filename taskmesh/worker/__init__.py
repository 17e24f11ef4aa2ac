"""The engine: fetch -> execute -> settle."""
