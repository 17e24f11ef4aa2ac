"""A run's versions formed again in this process, from a checkpoint and the ledger.

The ledger says of each version what it was formed from. Shards are computed, summed and applied here by the code that
workers and masters run, one after the other, so on an equal machine the bits are those of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import Part, checksum_of, digest_of, root_of
from taskmesh.checkpoints.tables import memories_of
from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.training.buckets import cut
from taskmesh.training.data import Sampler
from taskmesh.training.ledger import LedgerEntry, Share
from taskmesh.training.memory import State, fresh, size_of, unpack
from taskmesh.training.modes import Asynchronous
from taskmesh.training.orders import ShardOrder, ShardResult
from taskmesh.training.past import bases
from taskmesh.training.plan import Owed, Plan, plan_of, plan_of_one
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.aggregate import Pool, Round, Update, new_round
from taskmesh.training.step.learner import Learner, scale_of
from taskmesh.training.step.progress import Past, Point, Progress
from taskmesh.training.step.receive import Receipt
from taskmesh.training.worker.replica import Computed, Recipe, Replica

ATTEMPT = "replay"


class Replay:
    """One run, taken through its steps again. Everything but ``__init__`` belongs in the compute thread.

    Attributes:
        progress: where it stands.
        remembers: its compression goes on from what it has left out before.
        loss: of the last step that was taken; None before it.
    """

    def __init__(self, setup: RunSetup, recipe: Recipe, learner: Learner) -> None:
        compression = setup.compression
        self._setup = setup
        self._layout = learner.flat.layout
        self._learner = learner
        self._replica = Replica(recipe)
        self._sampler = Sampler(setup.samples, setup.batch_size, setup.seed)
        self._buckets = cut(self._layout, whole=compression.takes_whole_parameters)
        self._pool = Pool(self._layout.parameter_count)
        self._gradient: list[Tensor] = []
        self._memories: dict[int, State] = {}
        self._past: dict[int, Past] = {}
        self.remembers = size_of(fresh(compression, self._buckets)) > 0
        self._is_without = False
        self.progress = Progress()
        self.loss: float | None = None

    def begin(self, progress: Progress, version: int, parts: Mapping[str, memoryview]) -> None:
        """The learner holds a checkpoint: go on from it, and from what its parts say was remembered.

        Raises:
            CheckpointError: they are another compression's.
        """
        like = fresh(self._setup.compression, self._buckets)
        self.progress = progress
        self._memories = {shard: unpack(data, like) for shard, data in memories_of(parts).items()}
        self._past = {}
        self._note(version)

    def _note(self, version: int) -> None:
        """Keep the parameters of a version for as long as gradients may be of it."""
        mode = self._setup.mode
        if isinstance(mode, Asynchronous):
            new = Past(self.progress.step, memoryview(bytearray(self.parameters)))
            self._past = bases.keep(self._past, mode.staleness, version, new)

    def point(self) -> Point:
        """The state, to come back to."""
        parameters = memoryview(bytes(self.parameters))
        state = copy.deepcopy(self._learner.state())
        return Point(parameters, state, self.progress, dict(self._memories), dict(self._past))

    def go_back(self, point: Point) -> None:
        self._learner.restore(point.parameters, copy.deepcopy(point.state))
        self.progress = point.progress
        self._memories, self._past = dict(point.memories), dict(point.past)

    @property
    def parameters(self) -> memoryview:
        """Of the version that was formed last."""
        return self._learner.flat.view()

    def digest(self, *, kept: bool = True) -> str:
        """The digest of the parameters, as the manifest of a version that is kept (or not) has it."""
        digest = digest_of if kept else checksum_of
        return root_of([digest(piece) for piece in chunks.split(self.parameters)]).hex()

    def advance(self, entry: LedgerEntry, without: str = "") -> int:
        """Form the next version. Returns how many contributions were left out.

        Args:
            without: a worker whose contributions are left out. A step to which nobody else contributed is not taken.

        Raises:
            CheckpointError: the ledger's entry does not fit the run, or lacks what is needed.
            TrainingError: what the run could use cannot be used here.
        """
        if entry.batch < 0:  # a rollback: the state is that of its parent
            self._past.clear()
            self._note(entry.version)
            return 0
        self._is_without = bool(without)
        try:
            plan = self._plan(entry)
        except IndexError:
            raise self._misfit(entry, "it names a shard that its batch does not have") from None
        shares = [share for share in sorted(entry.shares) if share.worker != without]
        update = self._gather(entry, plan, shares)
        losses = self.progress.losses
        if update is not None:
            losses = losses.add(update.loss, self._setup.divergence.window)
            self.loss = update.loss
        self.progress = replace(
            self.progress,
            step=entry.step,
            drawn=entry.drawn or plan.drawn,
            losses=losses,
            owed=entry.owed,
        )
        self._note(entry.version)
        return len(entry.shares) - len(shares)

    def _plan(self, entry: LedgerEntry) -> Plan:
        if self._setup.is_asynchronous:
            return self._plan_of_one(entry)
        batches = range(entry.batch, entry.batch + self._setup.batches)  # what is left out are whole plans
        plan = plan_of(self._sampler, entry.step, batches, self._setup.shards, entry.extra)
        shards = [share.shard for share in sorted(entry.shares)]
        late = [plan.owed(shard) for shard in range(len(plan.shards)) if shard not in shards]
        if entry.step != self.progress.step + 1 or tuple(map(len, plan.shards)) != entry.samples:
            raise self._misfit(entry, f"step {self.progress.step} does not lead to its step and samples")
        if len(shards) + len(late) != len(plan.shards) or not set(late) <= set(entry.owed):
            raise self._misfit(entry, f"it names shards {shards} of {len(plan.shards)}")
        return plan

    def _plan_of_one(self, entry: LedgerEntry) -> Plan:
        shards = [share.shard for share in entry.shares]
        if len(shards) != 1 or entry.step != self.progress.step + 1:
            raise self._misfit(entry, f"it names shards {shards} of step {entry.step}")
        plan = plan_of_one(self._sampler, Owed(entry.batch, shards[0]), self._setup.shards)
        if tuple(map(len, plan.shards)) != entry.samples:
            raise self._misfit(entry, f"shard {shards[0]} of batch {entry.batch} has other samples")
        return plan

    def _misfit(self, entry: LedgerEntry, reason: str) -> CheckpointError:
        return CheckpointError(
            f"run {self._setup.name!r}: the ledger's entry of version {entry.version} does not fit the run: {reason}"
        )

    def _gather(self, entry: LedgerEntry, plan: Plan, shares: Sequence[Share]) -> Update | None:
        """Compute the shards of these shares and take the step; None where there is nothing to take."""
        if not shares:
            return None
        round_ = new_round(self._setup, len(plan.shards), self._buckets, self._pool)
        base = Past(self.progress.step, self.parameters)
        if self._setup.is_asynchronous:
            base = bases.find(self._past, entry)
        memories: dict[int, State] = {}
        try:
            for share in shares:
                found = self._compute(entry, plan, share, base.parameters)
                self._put(round_, share.shard - plan.first, entry, share, found)
                memories[share.shard] = found.memory
            there = {share.shard - plan.first for share in shares}
            for shard in set(range(len(plan.shards))) - there:
                round_.leave_out(shard)
            if not round_.count:
                return None
            update = round_.update()
            scale = scale_of(self.progress.step - base.step)
            reason = self._learner.apply(update, entry.step, scale)
        finally:
            round_.release()
        if reason is not None:
            raise TrainingError(f"run {self._setup.name!r}: version {entry.version} formed again: {reason}")
        if self.remembers:
            self._memories.update(memories)
        return update

    def _compute(self, entry: LedgerEntry, plan: Plan, share: Share, parameters: memoryview) -> Computed:
        order = ShardOrder(
            entry.parent,
            plan.step,
            share.shard,
            plan.shards[share.shard - plan.first],
            plan.lengths[share.shard - plan.first],
            Part(False, entry.parent if entry.base < 0 else entry.base, 0, 0, len(parameters), ()),
            self._layout.digest,
            self._setup.agreement,
        )
        state = self._memory(entry, share.shard)
        found = self._replica.compute(order, parameters, self._gradient, state, _leave)
        if found.reason is not None:
            raise self._unusable(entry, share, found.reason)
        return found

    def _memory(self, entry: LedgerEntry, shard: int) -> State | None:
        """What the compression of a shard goes on from."""
        if not self.remembers or shard in entry.anew:
            return None
        if shard not in self._memories and not self._is_without:
            raise _unknown_memory(entry, shard)
        return self._memories.get(shard)  # of a worker that is left out nothing came to others

    def _put(self, round_: Round, place: int, entry: LedgerEntry, share: Share, found: Computed) -> None:
        """Put a shard into the round as a master does with what has arrived."""
        sizes = tuple(piece.nbytes for piece in found.pieces)
        result = ShardResult(
            "computed",
            share.worker,
            "",
            found.loss_sum,
            found.samples,
            sizes,
            b"".join(found.pieces),
            ATTEMPT,
        )
        receipt = Receipt(ATTEMPT, place, round_, self._buckets, self._layout, self._setup.compression)
        receipt.claim(result)
        if receipt.fault is None:
            receipt.take_inline(result)
        fault = receipt.close()
        if fault is not None:
            raise self._unusable(entry, share, fault)

    def _unusable(self, entry: LedgerEntry, share: Share, reason: str) -> TrainingError:
        return TrainingError(
            f"run {self._setup.name!r}: version {entry.version} formed again: shard {share.shard} cannot be used: "
            f"{reason}"
        )


def _leave(place: int, piece: memoryview) -> None:
    """A piece of a payload that nobody waits for."""


def lineage(entries: Iterable[LedgerEntry], last: int) -> list[LedgerEntry]:
    """What led to a version, oldest first, as far back as the ledger goes without a gap.

    Versions that were rolled back, and those of a master that died after its last checkpoint, are not among them. A
    version that was formed without a worker begins anew.
    """
    known = {entry.version: entry for entry in entries}
    way: list[LedgerEntry] = []
    while last in known and known[last].parent < last and not known[last].without:
        way.append(known[last])
        last = known[last].parent
    return way[::-1]


def way_between(way: Sequence[LedgerEntry], first: int, last: int) -> list[LedgerEntry]:
    """The part of a lineage that follows one of its versions.

    Raises:
        CheckpointError: that version did not lead to the last one, or the ledger does not reach back to it.
    """
    if first == last:
        return []
    for place, entry in enumerate(way):
        if entry.parent == first:
            return list(way[place:])
    oldest = way[0].parent if way else last
    if first < oldest:
        raise CheckpointError(
            f"the ledger does not reach back to version {first}: it has what formed version {last} from version "
            f"{oldest} on"
        )
    raise CheckpointError(
        f"version {first} did not lead to version {last}: the run went back to an older one"
    )


def choose_start(
    way: Sequence[LedgerEntry],
    last: int,
    kept: Container[int],
    check: Callable[[int, Sequence[LedgerEntry]], None],
) -> int:
    """The oldest kept version on a lineage from which the last one can be formed.

    Args:
        check: raises what speaks against a way that begins with that version.

    Raises:
        CheckpointError: there is none.
    """
    refusal: CheckpointError | None = None
    for place, entry in enumerate(way):
        if entry.parent in kept:
            try:
                check(entry.parent, way[place:])
            except CheckpointError as error:
                refusal = refusal or error
            else:
                return entry.parent
    raise refusal or CheckpointError(f"no version that led to version {last} is kept (any more)")


def check_memories(way: Sequence[LedgerEntry], kept: Iterable[int]) -> None:
    """See that it is known all along what a compression that remembers goes on from.

    Args:
        kept: the shards whose memory is in the checkpoint that the way begins with.

    Raises:
        CheckpointError: it is not.
    """
    known = set(kept)
    for entry in way:
        for share in entry.shares:
            if share.shard not in entry.anew and share.shard not in known:
                raise _unknown_memory(entry, share.shard)
            known.add(share.shard)


def _unknown_memory(entry: LedgerEntry, shard: int) -> CheckpointError:
    return CheckpointError(
        f"version {entry.version} cannot be formed again from there: the checkpoint does not have what the compression "
        f"of shard {shard} remembered; an older release kept it"
    )
