"""Submits that are confirmed by replicas or by disks: the same scripts, with WAIT or WAITAOF behind them.

Both commands speak of what their own connection wrote, and block it: hence a connection of its own. Writes that went
before on other connections to the same node, such as the chunks of a large argument, are covered as well.
"""

from __future__ import annotations

from typing import Any

from taskmesh.broker.caller import Caller
from taskmesh.broker.link import REPLY_TIMEOUT, Command, Link, Moved, NoGroup
from taskmesh.errors import BrokerError, BrokerUnavailable, ConfigurationError, ServerTooOld
from taskmesh.settings import Durability


class ConfirmingCaller(Caller):
    """Runs one script at a time, each with its confirmation. A script that is sent again must write again.

    Attributes:
        doubt: what the last script's writes lack, in words; empty when they were confirmed.
    """

    def __init__(self, caller: Caller, durability: Durability, tag: bytes) -> None:
        super().__init__(caller.server, caller.clock, caller.retry_for)
        self._durability = durability
        self._own = caller.server.dedicated(tag)
        self._checked_generation = 0
        self.doubt = ""

    async def close(self) -> None:
        """End the connection."""
        await self._own.close()

    def _link(self, tag: bytes) -> Link:
        return self._own

    async def _call(self, link: Link, command: Command) -> Any:
        await self._check(link)
        timeout = REPLY_TIMEOUT + self._durability.timeout
        reply, confirmed = await link.call_many((command, self._wait()), timeout)
        if isinstance(reply, BrokerError):
            raise reply
        if isinstance(confirmed, (NoGroup, Moved, BrokerUnavailable)):
            # No primary any more: the batch goes to its successor, which may or may not have it.
            raise BrokerUnavailable(f"{link.where} stopped being the primary: {confirmed}")
        self.doubt = self._missing(confirmed)
        return reply

    def _wait(self) -> Command:
        wanted = self._durability
        timeout_ms = max(1, int(wanted.timeout * 1000))
        if wanted.aof:
            return ("WAITAOF", 1, wanted.replicas, timeout_ms)
        return ("WAIT", wanted.replicas, timeout_ms)

    async def _check(self, link: Link) -> None:
        """Before anything is submitted over a new connection: see that the server can confirm at all.

        Raises:
            ServerTooOld: it has no WAITAOF.
            ConfigurationError: it writes no append-only file.
        """
        if not self._durability.aof or link.generation == self._checked_generation > 0:
            return
        try:
            await link.call("WAITAOF", 1, 0, 1)
        except BrokerError as error:
            raise self._refusal(link, error) from None
        self._checked_generation = link.generation

    def _refusal(self, link: Link, error: BrokerError) -> Exception:
        text = str(error)
        if "unknown command" in text:
            return ServerTooOld(
                f"{self.server.where} is {self.server.version}: "
                "Durability(aof=True) needs Redis 7.2 or Valkey; nothing was submitted"
            )
        if "appendonly is disabled" in text:
            return ConfigurationError(
                f"{link.where} writes no append-only file (appendonly no), which Durability(aof=True) asks for; "
                "nothing was submitted"
            )
        if "replica instances" in text:
            return BrokerUnavailable(f"{link.where} is not the primary")
        return error

    def _missing(self, confirmed: Any) -> str:
        """What a reply of WAIT or WAITAOF falls short of."""
        wanted = self._durability
        if isinstance(confirmed, BrokerError):
            return str(confirmed)
        on_disk, replicas = confirmed if wanted.aof else (1, confirmed)
        missing = []
        if on_disk < 1:
            missing.append("its append-only file was not on disk")
        if replicas < wanted.replicas:
            missing.append(f"{replicas} of {wanted.replicas} replicas confirmed")
        return f"{' and '.join(missing)} within {wanted.timeout:g} s" if missing else ""
