"""One adapter for each side, all with the same functions; see `settings` for what they share.

    connect() close()               the producer's connections
    enqueue(task, i)                one task ("noop", "suspend", "nap", "slow"); its argument is its slot
    enqueue_bulk(task, ids)         the peer's bulk call, or a gather of all of them
    roundtrip(i)                    submit a no-op and wait for its result
    run_worker()                    a worker in this process, until it is ended by a signal

The functions are async or plain, as the peer is. An adapter uses its peer only through the peer's public API.
"""
