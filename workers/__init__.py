"""The programs of a deployment: compose.yaml runs them. They use the public API only."""
