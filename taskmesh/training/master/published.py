"""What lies on the server for the workers while they need it: parameters of versions, or the steps that lead there.

It can be formed again, so it lies on the server without AOF, with a time to live besides.
"""

from __future__ import annotations

import functools
from collections import Counter

from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.checkpoints.store import VersionStore
from taskmesh.training.room import when_there_is_room
from taskmesh.training.step import downlink
from taskmesh.training.step.downlink import Step
from taskmesh.training.step.learner import Learner

RECENT = 8  # steps that stay for workers that are a little behind, whatever checkpoints there are
MOST = 64  # steps that stay at once


class Published:
    """One run's, for the holder of a fencing token."""

    def __init__(self, store: VersionStore, learner: Learner, token: int) -> None:
        self._store = store
        self._learner = learner
        self._token = token
        self._when_there_is_room = functools.partial(when_there_is_room, who=f"run {store.keys.run}")
        self._parameters: dict[int, Part] = {}  # of versions before the current one
        self._held: Counter[int] = Counter()  # versions whose parameters somebody is to have
        self._steps: list[Part] = []  # that led to versions before the current one

    async def write(self, version: int, step: int, parent: Manifest | None) -> dict[str, Part]:
        """Write the parameters that the learner holds, or the step that led to them, as a version's parts.

        Raises:
            BrokerFull: the server has no room, for minutes.
        """
        view, sent = self._learner.flat.view(), self._learner.sent
        if sent is None:
            write = functools.partial(self._store.write, version, self._token, view)
            return {"parameters": await self._when_there_is_room(write)}
        assert parent is not None
        data = downlink.encode(Step(parent.version, parent.parts.get("update"), step, sent))
        write_step = functools.partial(self._store.write_update, version, self._token, data, view)
        return await self._when_there_is_room(write_step)

    async def write_again(self, part: Part) -> None:
        """Write the parameters again that the learner holds: the server has lost them, or holds something else."""
        view = self._learner.flat.view()
        await self._when_there_is_room(lambda: self._store.rewrite(part, view, self._token))

    def hold(self, version: int) -> None:
        """Let the parameters of the current version stay when it is not current any more."""
        self._held[version] += 1

    def release(self, version: int) -> None:
        """They are not needed any more."""
        self._held[version] -= 1
        if not self._held[version]:
            del self._held[version]

    async def let_go(self, before: Manifest, current: Manifest, newest: Manifest | None) -> None:
        """A version gives way to the current one: unlink what nobody needs of it, and of those before it.

        Args:
            newest: checkpoint.
        """
        if "update" not in before.parts:
            self._parameters[before.version] = before.parts["parameters"]
            for version in [each for each in self._parameters if not self._held[each]]:
                await self._store.forget(self._parameters.pop(version))
            return
        self._steps.append(before.parts["update"])
        for part in list(self._steps) if current.kept else self._unneeded(newest):
            await self._store.forget(part)
            self._steps.remove(part)

    def _unneeded(self, newest: Manifest | None) -> list[Part]:
        """The steps that no worker goes on by: it begins at a checkpoint, or is not so far behind."""
        kept = -1 if newest is None else newest.version
        newest_first = enumerate(reversed(self._steps))
        return [
            part
            for place, part in newest_first
            if place >= MOST or (place >= RECENT and part.version <= kept)
        ]
