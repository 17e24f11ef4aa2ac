"""Who may write a run: one leader at a time, each with a fencing token higher than the last one's.

Redis's clock decides when a lease has run out. A leader that was stopped past it may still believe that it leads;
every write of a master carries its token, and the scripts refuse one that is not the newest. (Fencing tokens:
Kleppmann, "How to do distributed locking", 2016.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable

from taskmesh.broker import chunks, scripts
from taskmesh.broker.caller import Caller
from taskmesh.errors import BrokerError, LeadershipLost, TrainingError
from taskmesh.keys import RunKeys

log = logging.getLogger("taskmesh.checkpoints")
LONGEST_LOOK = 0.5


class Lease:
    """One contender for a run's leadership.

    Attributes:
        token: of the leadership held; 0 before the first.
    """

    def __init__(self, caller: Caller, keys: RunKeys, ttl: float) -> None:
        self._caller = caller
        self._keys = keys
        self._ttl_ms = int(ttl * 1000)
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.token = 0

    async def acquire(
        self, timeout: float | None = None, on_wait: Callable[[str], None] | None = None
    ) -> int:
        """Wait until the lease is free, take it and return the fencing token.

        A leader that dies holds it for the rest of its time to live; one that ends gives it up.

        Args:
            on_wait: told each leader that it waits for, by name.

        Raises:
            TrainingError: another process led all through ``timeout`` seconds; its name is in the message.
        """
        give_up_at = None if timeout is None else self._caller.clock.monotonic() + timeout
        told = ""
        while True:
            reply = await self._caller.run(
                scripts.LEAD, self._keys.tag, [self._keys.lease], (self.owner, self._ttl_ms)
            )
            if reply[0]:
                self.token = int(reply[0])
                return self.token
            left = int(reply[1]) / 1000
            leader = reply[2].decode()
            if give_up_at is not None and self._caller.clock.monotonic() >= give_up_at:
                raise TrainingError(f"run {self._keys.run!r} is led by {leader}")
            if leader != told:
                log.info("run %s: %s leads it; waiting for the lease", self._keys.run, leader)
                if on_wait is not None:
                    on_wait(leader)
                told = leader
            await asyncio.sleep(min(left + 0.001, LONGEST_LOOK))

    async def leader(self) -> str | None:
        """Who leads the run now; None where nobody does."""
        commands = [("HMGET", self._keys.lease, "owner", "expires_ms"), ("TIME",)]
        (owner, expires_ms), (seconds, micros) = await chunks.call_many(
            self._caller, self._keys.tag, commands
        )
        if owner is None or int(expires_ms) <= 1000 * int(seconds) + int(micros) // 1000:
            return None
        return str(owner.decode())

    async def renew(self) -> None:
        """Hold the lease for another time to live.

        Raises:
            LeadershipLost: another leader has come since.
        """
        if not await self._keep(self._ttl_ms):
            raise LeadershipLost(
                f"run {self._keys.run!r}: another master leads it now; token {self.token} is old"
            )

    async def hold(self) -> None:
        """Renew it for ever, three times in a time to live; the scripts fence while the server is away.

        Raises:
            LeadershipLost: another leader has come.
        """
        while True:
            await asyncio.sleep(self._ttl_ms / 3000)
            try:
                await self.renew()
            except BrokerError as error:
                log.warning("run %s: the lease could not be renewed: %s", self._keys.run, error)

    async def release(self) -> None:
        """Give the leadership up, so that the next leader need not wait."""
        await self._keep(0)

    async def _keep(self, ttl_ms: int) -> bool:
        return bool(
            await self._caller.run(
                scripts.KEEP_LEAD, self._keys.tag, [self._keys.lease], (self.token, ttl_ms)
            )
        )
