"""A step, from gradients to parameters: receive, sum, clip, send, apply; and the state that it leaves."""
