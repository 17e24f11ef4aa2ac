"""The `taskmesh` command."""
