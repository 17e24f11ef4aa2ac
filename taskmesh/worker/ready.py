"""What a worker has brought in and not started: a queue of three lanes."""

from __future__ import annotations

from collections import deque

from taskmesh.messages import Priority
from taskmesh.worker.deliveries import Delivery

# By lane: so often others go first before it has its turn.
PATIENCE = (0, 4, 16)


class Ready:
    """Deliveries in order of priority; none starves."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[Delivery], ...] = tuple(deque() for _ in Priority)
        self._passed_over = [0 for _ in Priority]

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __bool__(self) -> bool:
        return any(self._lanes)

    def add(self, delivery: Delivery) -> None:
        self._lanes[delivery.lane].append(delivery)

    def next(self) -> Delivery | None:
        """The most urgent, unless a lane has been passed over so often that it is its turn."""
        high, normal, low = self._lanes
        if not (high or low):  # nearly always
            return normal.popleft() if normal else None
        chosen: int | None = None
        for lane, waiting in enumerate(self._lanes):
            if not waiting:
                continue
            if chosen is None:
                chosen = lane
                continue
            self._passed_over[lane] += 1
            if self._passed_over[lane] > PATIENCE[lane]:
                chosen = lane
        if chosen is None:
            return None
        self._passed_over[chosen] = 0
        return self._lanes[chosen].popleft()

    def remove(self, delivery: Delivery) -> bool:
        """Take one out; False when it is not here."""
        lane = self._lanes[delivery.lane]
        if delivery not in lane:
            return False
        lane.remove(delivery)
        return True

    def take(self) -> list[Delivery]:
        """Take everything out."""
        taken = [delivery for lane in self._lanes for delivery in lane]
        for lane in self._lanes:
            lane.clear()
        return taken

    def oldest_wait(self, now: float) -> float:
        """Seconds that the delivery that has waited longest has waited."""
        return max((now - lane[0].arrived for lane in self._lanes if lane), default=0.0)
