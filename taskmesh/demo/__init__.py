"""`taskmesh demo`: the main job, end to end, on this machine."""
