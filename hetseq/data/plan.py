"""Step plans: which samples make a step, and which group computes which. Pure functions over integers, NumPy only.

The order of an epoch is a keyed permutation of 0..n-1 with random access, so no rank holds a shuffled array and any
rank can begin anywhere. A step takes the next run of positions in that order; its length depends on the epoch alone
and never on the cluster. Data-parallel groups then take neighbouring slices of the run, sized by their shares, and cut
them into micro-batches. A share belongs to such a group, usually a single rank (`balance.layout`). Nothing here knows
data, devices, time or torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hetseq.data.shards import ShardedOrder, Shards

Indices = npt.NDArray[np.int64]
#: lengths of samples by index: indices (k,) -> tokens (k,)
Lengths = Callable[[Indices], Indices]


class Assign(Protocol):
    """Divides the work of a step, in samples, tokens or units, among the data-parallel groups; parts add up to `work`.

    With `among`, the numbers of some groups, these take all of it, and the result lists only them.
    """

    def __call__(self, work: int, among: tuple[int, ...] | None = None, /) -> tuple[int, ...]: ...


_ROUNDS = 6
_BLOCK = 8192  # positions permuted at once; amortises the NumPy calls over many small micro-batches
_WINDOW = 16  # blocks of neighbours whose samples are shuffled together
_SCAN = 1024  # samples read per round when a step is filled by tokens
_REMEMBERED = 16  # changes of the shares; plans of earlier steps are never requested


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers, such as (run seed, step, position); equal on every machine."""
    words = b"".join(int(part).to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


class EpochOrder:
    """The order of one epoch: position -> sample index, with random access and O(1) memory.

    A Feistel network with modular addition over Z_a x Z_b, a*b >= n (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"), walked until the value falls below n. Individual samples are shuffled, not batches of neighbours.
    """

    def __init__(self, n: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.n = n
        self._shuffle = shuffle and n > 1
        self._a = max(1, int(np.ceil(np.sqrt(n))))
        self._b = max(1, -(-n // self._a))
        self._keys = [np.uint64(derive_seed(seed, epoch, number)) for number in range(_ROUNDS)]
        self._block_start = -1
        self._block = np.empty(0, np.int64)

    def take(self, start: int, stop: int) -> Indices:
        """Sample indices at positions start..stop-1, shape (stop - start,)."""
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions {start} to {stop} of an epoch of {self.n} samples")
        if not self._shuffle:
            return np.arange(start, stop, dtype=np.int64)
        pieces = [self._cached(block)[max(start - block, 0) : stop - block] for block in self._blocks(start, stop)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    @staticmethod
    def _blocks(start: int, stop: int) -> range:
        return range(start - start % _BLOCK, stop, _BLOCK)

    def _cached(self, block_start: int) -> Indices:
        if block_start != self._block_start:
            positions = np.arange(block_start, min(block_start + _BLOCK, self.n), dtype=np.uint64)
            self._block, self._block_start = self._permute(positions), block_start
        return self._block

    def _permute(self, positions: npt.NDArray[np.uint64]) -> Indices:
        values = self._encipher(positions)
        outside = values >= self.n
        while outside.any():  # cycle walking: a*b < n + a, so few values ever walk
            values[outside] = self._encipher(values[outside])
            outside = values >= self.n
        return values.astype(np.int64)

    def _encipher(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        moduli = np.uint64(self._a), np.uint64(self._b)
        left, right = values % moduli[0], values // moduli[0]  # left in Z_a, right in Z_b
        for number, key in enumerate(self._keys):
            left, right = right, (left + _mix(right ^ key)) % moduli[number % 2]
        return right * moduli[0] + left  # an even number of rounds: the halves are in their own moduli again


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser, shifted down so that a later addition cannot wrap."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(16)


class BlockOrder:
    """An epoch order that shuffles blocks of `block` neighbours, for slow file systems: position -> sample index.

    Blocks are shuffled like samples in `EpochOrder`. Then the samples of every 16 consecutive blocks, a window, are
    shuffled among themselves. So a reader that is 16 blocks ahead reads in long runs, and a step still takes its
    samples from 16 places. The last block may be shorter and can come anywhere among the others. Memory: the indices
    of two windows.
    """

    def __init__(self, n: int, block: int, *, seed: int, epoch: int) -> None:
        self.n, self.block = n, block
        whole, self._rest = divmod(n, block)
        self._seed, self._epoch = seed, epoch
        self._blocks = EpochOrder(whole, seed=derive_seed(seed, block), epoch=epoch)
        # how many whole blocks come before the short one
        self._before = derive_seed(seed, epoch, block) % (whole + 1) if self._rest else whole
        self._held: dict[int, Indices] = {}

    def take(self, start: int, stop: int) -> Indices:
        """Sample indices at positions start..stop-1, shape (stop - start,)."""
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions {start} to {stop} of an epoch of {self.n} samples")
        pieces, window = [np.empty(0, np.int64)], self._window_at(start)
        while (begin := self._begin_of(window)) < stop:
            pieces.append(self._samples_of(window)[max(start - begin, 0) : stop - begin])
            window += 1
        return np.concatenate(pieces)

    def _begin_of(self, window: int) -> int:
        """The first position of a window of blocks; n after the last one."""
        blocks = _WINDOW * window
        shorter = self.block - self._rest if self._rest and blocks > self._before else 0
        return min(blocks * self.block - shorter, self.n)

    def _window_at(self, position: int) -> int:
        window = position // (_WINDOW * self.block)
        return window + 1 if self._begin_of(window + 1) <= position < self.n else window

    def _samples_of(self, window: int) -> Indices:
        if window not in self._held:
            first = _WINDOW * window
            numbers = np.arange(first, min(first + _WINDOW, self._blocks.n + bool(self._rest)))
            listed = [np.arange(*self._range_of(number), dtype=np.int64) for number in numbers.tolist()]
            samples = np.concatenate(listed)
            key = np.uint64(derive_seed(self._seed, self._epoch, self.block, window))
            order = np.argsort(_mix(samples.astype(np.uint64) ^ key), kind="stable")
            self._held = dict([*self._held.items()][-1:]) | {window: samples[order]}
        return self._held[window]

    def _range_of(self, number: int) -> tuple[int, int]:
        """The samples of the `number`-th block of the epoch."""
        if self._rest and number == self._before:
            return self._blocks.n * self.block, self.n
        place = number - 1 if self._rest and number > self._before else number
        begin = int(self._blocks.take(place, place + 1)[0]) * self.block
        return begin, begin + self.block


Order = EpochOrder | BlockOrder | ShardedOrder


def epoch_order(
    n: int, *, seed: int, epoch: int, shuffle: bool = True, block: int | None = None
) -> EpochOrder | BlockOrder:
    """The order of epoch `epoch` (from 1) over `n` samples; `block` shuffles in blocks of that many samples."""
    if block is not None and shuffle:
        return BlockOrder(n, block, seed=seed, epoch=epoch)
    return EpochOrder(n, seed=seed, epoch=epoch, shuffle=shuffle)


@dataclass(frozen=True)
class GlobalBatch:
    """The number of samples in one optimizer step, over all ranks: a function of the epoch alone.

    A step of epoch e ends after update_freq[e] * samples samples or update_freq[e] * tokens tokens, whichever comes
    first; later epochs repeat the last update_freq. At least one of `samples` and `tokens` is set.
    """

    samples: int | None
    tokens: int | None = None
    update_freq: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        assert self.samples or self.tokens, "a global batch is counted in samples or in tokens"

    def factor(self, epoch: int) -> int:
        return self.update_freq[min(epoch, len(self.update_freq)) - 1]

    def sample_limit(self, epoch: int) -> int | None:
        return None if self.samples is None else self.samples * self.factor(epoch)

    def token_limit(self, epoch: int) -> int | None:
        return None if self.tokens is None else self.tokens * self.factor(epoch)


@dataclass(frozen=True)
class MicroBatchCap:
    """Upper limits of one micro-batch on this node; None means no limit.

    With `is_ramp`, sizes double from one sample on, and the last is no larger than an earlier one: for a rank whose
    speed and memory are not known yet.
    """

    samples: int | None = None
    tokens: int | None = None
    multiple: int = 1  # larger sizes are rounded down to a multiple of this
    is_ramp: bool = False

    @property
    def most_samples(self) -> int | None:
        """The size of all micro-batches but the last of a share, unless another limit is hit first; None: no limit."""
        if self.samples is None or self.samples <= self.multiple:
            return self.samples
        return self.samples - self.samples % self.multiple


@dataclass(frozen=True)
class Position:
    """Progress through the data: `consumed` samples of epoch `epoch` are used, `step` is the next step."""

    step: int = 1
    epoch: int = 1
    consumed: int = 0


@dataclass(frozen=True)
class StepPlan:
    """Step `step` uses positions start..stop-1 of epoch `epoch`, and each data-parallel group `shares[group]` of them.

    Their slices follow one another in the order of the groups, or of `lineup` if given. With `is_repeated`, the next
    step uses the same positions, divided alike.
    """

    step: int
    epoch: int
    start: int
    stop: int
    shares: tuple[int, ...]
    ends_epoch: bool
    lineup: tuple[int, ...] | None = None
    is_repeated: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start

    def range_of(self, group: int) -> tuple[int, int]:
        """First and end position of this group's share."""
        ahead = range(group) if self.lineup is None else self.lineup[: self.lineup.index(group)]
        start = self.start + sum(self.shares[other] for other in ahead)
        return start, start + self.shares[group]

    def digest(self) -> int:
        """63 bits that differ where two ranks would compute different steps."""
        return derive_seed(self.step, self.epoch, self.start, self.stop, *self.shares)

    def next_position(self) -> Position:
        if self.is_repeated:
            return Position(self.step + 1, self.epoch, self.start)
        if self.ends_epoch:
            return Position(self.step + 1, self.epoch + 1, 0)
        return Position(self.step + 1, self.epoch, self.stop)


@dataclass
class Planner:
    """Plans the steps of one run: `plan(position)` is a pure function of the position and of the changes made so far.

    `assign` divides the work of a step among the data-parallel groups until `change` names another for later steps.
    Work is counted in samples, or in tokens if there are `lengths`, or in units if `unit` is above 1: a share then has
    whole units of `unit` neighbours, and only the last unit of a step may be smaller. With `shards`, `n` samples in
    total, each shard's part of a step is divided among the groups that can read it; steps are then counted in samples.
    `repeats` steps in a row use the same samples, as for two optimizers that take turns.
    """

    n: int
    seed: int
    batch: GlobalBatch
    assign: Assign
    curriculum: int = 0  # the first N epochs keep the data's own order
    lengths: Lengths | None = None
    unit: int = 1
    block: int | None = None  # neighbours that are shuffled together; None shuffles single samples
    shards: Shards | None = None
    repeats: int = 1
    _orders: dict[int, Order] = field(default_factory=dict)
    _changes: list[tuple[int, Assign]] = field(default_factory=list)  # (first step, assign), steps ascending

    def copy(self) -> Planner:
        """A separate planner with the same plans: planners cache orders and are not thread-safe."""
        args = (self.n, self.seed, self.batch, self.assign, self.curriculum, self.lengths, self.unit, self.block)
        return Planner(*args, self.shards, self.repeats, _changes=list(self._changes))

    def change(self, step: int, assign: Assign) -> None:
        """From step `step` on, divide the work by `assign`; plans of earlier steps do not change."""
        assert not self._changes or self._changes[-1][0] <= step, "changes come in the order of steps"
        self._changes.append((step, assign))
        del self._changes[:-_REMEMBERED]

    def order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            for old in [known for known in self._orders if known < epoch - 1]:
                del self._orders[old]  # all but the previous epoch, which a loader may still be reading
            self._orders[epoch] = self._make_order(epoch)
        return self._orders[epoch]

    def plan(self, position: Position) -> StepPlan:
        start = position.consumed
        stop = self._end_of_step(position.epoch, start)
        shares = self._shares(position, stop)
        assert sum(shares) == stop - start, "shares must add up to the global batch"
        lineup = None if self.shards is None else self.shards.lineup
        is_repeated = position.step % self.repeats != 0
        ends_epoch = stop == self.n and not is_repeated
        return StepPlan(
            position.step, position.epoch, start, stop, shares, ends_epoch=ends_epoch, lineup=lineup,
            is_repeated=is_repeated,
        )  # fmt: skip

    def plans(self, position: Position) -> Iterator[StepPlan]:
        """The plans of this step and all later ones; endless."""
        while True:
            plan = self.plan(position)
            yield plan
            position = plan.next_position()

    def digest(self, plan: StepPlan) -> int:
        """63 bits that differ where two ranks would compute different steps, or use other data or orders."""
        shards = () if self.shards is None else (*self.shards.samples, *(plan.lineup or ()))
        repeats = () if self.repeats == 1 else (self.repeats,)
        return derive_seed(plan.digest(), self.n, self.seed, self.curriculum, self.block or 0, *shards, *repeats)

    def micro_batches(self, plan: StepPlan, group: int, cap: MicroBatchCap) -> list[tuple[int, int]]:
        """This group's micro-batches of a step as position ranges, in order; none for a share of 0."""
        start, stop = plan.range_of(group)
        return cut(self.order(plan.epoch), start, stop, cap, lengths=self.lengths)

    def work(self, epoch: int, start: int, stop: int) -> int:
        """The work of positions start..stop-1 in samples, tokens or units, in which a step is divided."""
        if self.lengths is not None:
            return int(self.lengths(self.order(epoch).take(start, stop)).sum())
        return -(-(stop - start) // self.unit)

    def assigner(self, step: int) -> Assign:
        """The function that divides the work of step `step`; steps over the same samples share one."""
        step -= (step - 1) % self.repeats
        return next((assign for first, assign in reversed(self._changes) if first <= step), self.assign)

    def divide(self, plan: StepPlan, assign: Assign) -> tuple[int, ...]:
        """The work of a step by data-parallel group, as `assign` divides it."""
        works = self.works(plan)
        return assign(works[0]) if self.shards is None else divided(works, self.shards, assign)

    def works(self, plan: StepPlan) -> tuple[int, ...]:
        """The work of a step: one value for all groups together or, with shards, one per shard."""
        if self.shards is None:
            return (self.work(plan.epoch, plan.start, plan.stop),)
        return self.shards.sizes(plan.start, plan.stop)

    def _make_order(self, epoch: int) -> Order:
        shuffle = epoch > self.curriculum
        if self.shards is None:
            return epoch_order(self.n, seed=self.seed, epoch=epoch, shuffle=shuffle, block=self.block)
        step = self.batch.sample_limit(epoch)
        assert step is not None, "steps over shards are counted in samples"
        orders = [
            epoch_order(size, seed=derive_seed(self.seed, number), epoch=epoch, shuffle=shuffle, block=self.block)
            for number, size in enumerate(self.shards.samples)
        ]
        return ShardedOrder(self.shards.samples, orders, step=step)

    def _shares(self, position: Position, stop: int) -> tuple[int, ...]:
        assign, start = self.assigner(position.step), position.consumed
        if self.shards is not None:
            return divided(self.shards.sizes(start, stop), self.shards, assign)
        if self.lengths is not None:
            return self._shares_by_tokens(assign, self.lengths(self.order(position.epoch).take(start, stop)))
        units = -(-(stop - start) // self.unit)
        shares = [count * self.unit for count in assign(units)]
        last = max(group for group, share in enumerate(shares) if share)
        shares[last] -= units * self.unit - (stop - start)
        return tuple(shares)

    @staticmethod
    def _shares_by_tokens(assign: Assign, lengths: Indices) -> tuple[int, ...]:
        """Samples by group, with tokens as close to the assigned ones as whole neighbouring samples allow."""
        ends = np.cumsum(lengths)  # (samples,): tokens up to and including each sample
        quotas = np.cumsum(assign(int(ends[-1])))  # (groups,): tokens up to and including each group
        # a sample belongs to the group whose part contains its middle; doubled, to stay in integers
        borders = np.searchsorted(2 * ends - lengths, 2 * quotas, side="left")
        # samples of length 0 at the very end have their middle at the last border
        borders[np.flatnonzero(quotas == quotas[-1])] = len(lengths)
        return tuple(np.diff(borders, prepend=0).tolist())

    def _end_of_step(self, epoch: int, start: int) -> int:
        samples, tokens = self.batch.sample_limit(epoch), self.batch.token_limit(epoch)
        stop = self.n if samples is None else min(self.n, start + samples)
        if tokens is None:
            return stop
        assert self.lengths is not None, "a batch counted in tokens needs the samples' lengths"
        return _fill(self.order(epoch), start, stop, tokens, self.lengths)


def divided(works: Sequence[int], shards: Shards, assign: Assign) -> tuple[int, ...]:
    """The work of each data-parallel group, when each shard's work is divided among the groups that can read it."""
    shares = [0] * shards.group_count
    for work, groups in zip(works, shards.readers):
        for group, share in zip(groups, assign(work, groups)):
            shares[group] += share
    return tuple(shares)


def cut(order: Order, start: int, stop: int, cap: MicroBatchCap, *, lengths: Lengths | None) -> list[tuple[int, int]]:
    """Cut positions start..stop-1 into runs that respect the cap (at least one sample each)."""
    pieces: list[tuple[int, int]] = []
    largest = 0
    while start < stop:
        end = stop if cap.samples is None else min(stop, start + cap.samples)
        if cap.is_ramp:
            end = min(end, start + _next_of_ramp(largest, stop - start))
        if cap.tokens is not None and lengths is not None:
            end = _fill(order, start, end, cap.tokens, lengths)
        size = end - start
        if end < stop and size > cap.multiple:
            end -= size % cap.multiple
        pieces.append((start, end))
        largest, start = max(largest, end - start), end
    return pieces


def _next_of_ramp(largest: int, left: int) -> int:
    """Twice the largest size so far, unless the last micro-batch would then be the largest."""
    size = max(1, 2 * largest)
    return largest if size >= left > largest > 0 else size


def _fill(order: Order, start: int, stop: int, tokens: int, lengths: Lengths) -> int:
    """The end of the longest run from `start` whose lengths sum to at most `tokens`; at least one sample."""
    used, position = 0, start
    while position < stop:
        end = min(stop, position + _SCAN)
        total = used + np.cumsum(lengths(order.take(position, end)))  # (end - position,): tokens up to each sample
        fitting = int(np.searchsorted(total, tokens, side="right"))
        if fitting < end - position:
            return max(position + fitting, start + 1)
        used, position = int(total[-1]), end
    return stop


def steps_in_epoch(n: int, batch: GlobalBatch, epoch: int) -> int | None:
    """The number of steps in an epoch, or None if it depends on the lengths of the samples."""
    samples = batch.sample_limit(epoch)
    return None if samples is None or batch.tokens is not None else -(-n // samples)
