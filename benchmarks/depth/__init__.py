"""The engine under load and at depth: long backlogs, a slow wire, dead workers, many workers, long runs."""
