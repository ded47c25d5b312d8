"""A pass of all ranks over whole splits, in place of training: the work of `hetseq evaluate` and `hetseq predict`.

Responsible for dividing a split, for the numbers and for the lines of predictions. Refuses to know how the ranks were
started and what becomes of the file. The one idea: the options alone cut a split into pieces, one forward each if
memory allows it; ranks get whole pieces, and the results are combined in the order of the pieces. So every number has
the same bits on any number of equal devices, and the assignment of pieces affects only speed: pieces are dealt in
rounds, by the speed that each rank has shown, and the rounds get shorter towards the end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hetseq import registry
from hetseq.balance.memory_plan import USABLE
from hetseq.balance.shares import assign_shares
from hetseq.checkpoint import CheckpointManager, Loaded, Retention
from hetseq.cluster.membership.assignment import InferenceJob
from hetseq.comm.group import Group
from hetseq.config.sections import Config
from hetseq.data.loader import MicroBatch, range_reader
from hetseq.errors import CheckpointError, ConfigError, HetSeqError, TaskError
from hetseq.parallel.base_parameters import check_same_base
from hetseq.parallel.delayed_init import is_absent, make_present_
from hetseq.parallel.gradient_sync import NO_ROUNDS, Rounds
from hetseq.parallel.host_numbers import HostNumbers
from hetseq.parallel.owned_names import OwnedNames, owned_names
from hetseq.parallel.owned_parameters import OwnedParameters
from hetseq.parallel.owned_units import Division
from hetseq.parallel.replica import check_fit, load_model_, model_tensors
from hetseq.run.loaded_task import LoadedTask, load_material
from hetseq.run.planning import make_validators
from hetseq.run.rank_room import rooms_of_ranks
from hetseq.run_directory import RunDirectory, json_line
from hetseq.system import rank_phase as whereabouts
from hetseq.system.files import write_all
from hetseq.system.rank_phase import Phase
from hetseq.task import Task, is_overridden, lengths_of, make_task, no_predictions
from hetseq.training.validation import Validator

logger = logging.getLogger(__name__)

Piece = tuple[int, int]  # samples start to stop - 1
Work = Callable[[Sequence[Piece]], list[bytes]]

_SILENCE_S = 1800.0  # of a rank: launchers see a death at once, but a large piece may take a CPU minutes
_ROUND_S = 20.0  # at most, so that no rank waits long for one that slows down, and the user sees progress
_MOST = 256  # pieces in one round, for each rank
_TELL_EVERY_S = 10.0
_ANEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare(errand: InferenceJob, config: Config, device: torch.device) -> LoadedTask:
    """The task, its data and its model on this rank. Raises HetSeqError, for a task without predictions at once."""
    task = make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    if errand.output is not None and not is_overridden(task, "predictions"):
        raise no_predictions(task)
    material = load_material(config, device, task)
    if not material.valid:
        raise ConfigError(f"the data have no split {config.data.valid_subset!r}: name one with --valid-subset")
    return material


def perform(errand: InferenceJob, config: Config, material: LoadedTask, group: Group) -> str:
    """Do the job; every rank calls it and gets the same lines for the user. Raises HetSeqError."""
    whereabouts.enter(Phase.SWEEPING)
    group.deadline_s = config.distributed.step_deadline or _SILENCE_S
    described = owned_names(material.model, with_frozen=True)
    owned = _owned(config, material, group, described)
    rounds = NO_ROUNDS if owned is None else owned
    step = _load(errand, config, material, group, owned, described)
    weights = _weights(config, group)
    lines = []
    for validator in make_validators(config, material):
        if errand.output is None:
            values = evaluate(validator, material.task, material.model, group, weights=weights, rounds=rounds)
            lines.append(_shown(step, validator.split, values, wants_json=errand.wants_json))
        else:
            count = predict(
                validator, material.task, material.model, group, Path(errand.output), weights=weights, rounds=rounds
            )
            lines.append(f"step {step} {validator.split} predictions {count}")
    if owned is not None:
        owned.close()
    return "\n".join(lines)


def _owned(config: Config, material: LoadedTask, group: Group, described: OwnedNames) -> OwnedParameters | None:
    """Parameters that come and go, without values yet; None: each rank has all of them. Collective."""
    model, layers, parameters = material.model, material.layers, list(material.model.parameters())
    fill, material.fill = material.fill, None  # all numbers but the base come from the checkpoint
    is_whole = not layers
    if layers and config.distributed.shard_model == "auto":
        rooms = rooms_of_ranks(parameters, group, config.distributed)
        is_whole = sum(one.nbytes for one in parameters) <= USABLE * min(one.capacity for one in rooms)
    if is_whole:
        if fill is not None:
            absent = [one for one in parameters if is_absent(one)]
            make_present_(absent)
            fill(absent)
        return None
    weights = config.distributed.own_weights() or ()
    fractions = weights if len(weights) == group.world_size else (1.0,) * group.world_size
    base = [one for one, name in described.by_parameter.items() if name in described.base]
    if fill is None:
        fill = HostNumbers(base, material.device, material.precision.storage, unchanged=base).fill
    owned = OwnedParameters(model, layers, described, group, Division(fractions), begins=False)
    owned.take_base(fill)
    return owned


def _load(
    errand: InferenceJob,
    config: Config,
    material: LoadedTask,
    group: Group,
    owned: OwnedParameters | None,
    described: OwnedNames,
) -> int:
    """Give the model, or what this rank owns of it, the weights of the checkpoint; the number of its step."""
    directory = RunDirectory(Path(errand.run))
    manager = CheckpointManager(
        directory.path, run_id=directory.run_id, group=group, retention=Retention(-1, -1)
    )  # fmt: skip
    which, model = config.checkpoint.which_checkpoint, material.model
    live = model_tensors(model)
    if owned is None:
        loaded = manager.load(which, into=live)
    else:
        own = {
            f"model.{name}": owned.own_fragments.get(at)
            for at, name in enumerate(described.by_parameter.values())
            if name not in described.base
        }

        def wanted(outline: Loaded) -> dict[str, list[tuple[int, int]]]:
            check_fit(live, outline.tensors)
            nothing: dict[str, list[tuple[int, int]]] = {
                name: [] for name in outline.tensors if name.startswith("optim.") or name in own
            }
            return nothing | {name: [(one.begin, one.end)] for name, one in own.items() if one is not None}

        common = {name: tensor for name, tensor in live.items() if name not in own}
        loaded = manager.load(which, into=common, wanted=wanted)
    if loaded is None:
        raise CheckpointError(f"{directory.path} holds no checkpoint that verifies: train it first")
    check_same_base(material.base, loaded.state)
    if owned is None:
        load_model_(material.model, loaded.tensors)
        return loaded.identity.step
    with torch.no_grad():
        for name, tensor in common.items():
            tensor.copy_(loaded.tensors[name])
        for name, one in own.items():
            if one is not None:
                (part,) = loaded.tensors[name]
                one.owned.data.copy_(part.tensor.view(one.owned.shape))
    return loaded.identity.step


def _weights(config: Config, group: Group) -> tuple[float, ...] | None:
    """The weights of `--balance`; None: by measured speed."""
    if config.distributed.balance == "equal":
        return (1.0,) * group.world_size
    return config.distributed.balance_weights()


def _shown(step: int, split: str, values: dict[str, float], *, wants_json: bool) -> str:
    if wants_json:  # named as in the rows of metrics.jsonl
        row = {"step": step, "subset": split, **{f"valid_{name}": value for name, value in values.items()}}
        return json_line(row).decode().rstrip("\n")
    return f"step {step} {split} " + " ".join(f"{name} {value:.6g}" for name, value in values.items())


def evaluate(
    validator: Validator,
    task: Task,
    model: torch.nn.Module,
    group: Group,
    *,
    weights: Sequence[float] | None = None,
    rounds: Rounds = NO_ROUNDS,
) -> dict[str, float]:
    """The result of `Validator.evaluate`, with the same bits for any shares; every rank calls it and gets the same.

    `weights`: fixed ones, by rank; None: by measured speed. In `rounds` the parameters of the model are here.
    """
    with validator.judging(task, model), rounds.without_gradients():
        names = validator.metric_names(task, model, rounds)

        def work(pieces: Sequence[Piece]) -> list[bytes]:
            rows = validator.rows(task, model, names, pieces, rounds)
            answers = [np.array(row, np.float64).tobytes() for row in rows]
            rounds.serve()
            return answers

        totals = [0.0] * (2 * (len(validator.terms) + len(names)))
        for row in sweep(group, validator.pieces(), work, weights=weights, what=validator.split):
            totals = [total + value for total, value in zip(totals, np.frombuffer(row).tolist(), strict=True)]
    return validator.figures(task, names, totals)


def predict(
    validator: Validator,
    task: Task,
    model: torch.nn.Module,
    group: Group,
    output: Path,
    *,
    weights: Sequence[float] | None = None,
    rounds: Rounds = NO_ROUNDS,
) -> int:
    """Write one line per sample of the split, in the order of the data set; rank zero writes. Returns their number.

    Every rank calls it. `output` must not exist; its content is on the disk once this returns. Raises TaskError for
    predictions that are not one line per sample, HetSeqError if rank zero cannot write.
    """
    # labels are not needed, so a split without them is not counted
    source = replace(validator.source, count=lambda sample, size: (), terms=0)
    lengths = lengths_of(source.dataset) if validator.lengths is not None else None
    validator = replace(validator, source=source, lengths=lengths)
    read = range_reader(source, is_listed=False)

    def lines_of(start: int, stop: int) -> bytes:
        batch = read(start, stop)
        with rounds.round():
            return _lines(task, task.predictions(model, source.place(batch.sample)), batch)

    def work(pieces: Sequence[Piece]) -> list[bytes]:
        answers = [b"".join(validator.in_parts(piece, lines_of)) for piece in pieces]
        rounds.serve()
        return answers

    with validator.judging(task, model), rounds.without_gradients(), ExitStack() as closing:
        file = _Output(output, closing) if group.rank == 0 else None
        for lines in sweep(group, validator.pieces(), work, weights=weights, what=validator.split):
            if file is not None:
                file.write(lines)
        if file is not None:
            file.finish()
    return len(source.dataset)


def _lines(task: Task, predictions: object, batch: MicroBatch) -> bytes:
    """The predictions of one batch as lines, checked."""
    name = f"{type(task).__name__}.predictions"
    if not isinstance(predictions, list) or len(predictions) != batch.size:
        found = f"{len(predictions)} of them" if isinstance(predictions, list) else type(predictions).__name__
        raise TaskError(f"{name} gave {found} for {batch.size} samples: expected a list with one text for each sample")
    for place, text in enumerate(predictions):
        sample = f"{name} gave {text!r:.80} for sample {batch.start + place}"
        if not isinstance(text, str):
            raise TaskError(f"{sample}: expected a text, such as str(...) of it")
        if "\n" in text or "\r" in text:
            raise TaskError(f"{sample}: expected one line, because each line is one sample; json.dumps gives one line")
    try:
        return "".join(f"{text}\n" for text in predictions).encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{name} gave a text that is not Unicode ({error.reason}): expected what UTF-8 has") from None


class _Output:
    """The file of predictions while it is written."""

    def __init__(self, path: Path, closing: ExitStack) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, _ANEW, 0o666)
        except OSError as error:
            raise self._trouble(error) from None
        closing.callback(os.close, self._descriptor)

    def write(self, lines: bytes) -> None:
        try:
            write_all(self._descriptor, lines)
        except OSError as error:
            raise self._trouble(error) from None

    def finish(self) -> None:
        """Flush the file to the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._trouble(error) from None

    def _trouble(self, error: OSError) -> HetSeqError:
        return HetSeqError(
            f"the predictions cannot be written in {self._path.parent}: {error.strerror}; choose another --output"
        )


def sweep(
    group: Group,
    pieces: Sequence[Piece],
    work: Work,
    *,
    weights: Sequence[float] | None = None,
    what: str = "",
    now: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """The result of `work` for each piece, in the order of the pieces; every rank calls it and gets all of them.

    `work` receives the pieces of this rank in one round. `now` is a clock in seconds, `weights` are fixed, by rank.
    """
    world_size, begin, begun_s = group.world_size, 0, now()
    told_s = begun_s
    rates: list[float] = []  # pieces per second of each rank, once known
    for number in range(len(pieces)):
        left = len(pieces) - begin
        shares = assign_shares(size_of_round(left, world_size, rates), weights or rates or [1.0] * world_size)
        own = begin + sum(shares[: group.rank])
        start_s = now()
        answers = work(pieces[own : own + shares[group.rank]])
        seconds, gathered = _exchange(group, now() - start_s, answers, most=max(shares))
        yield from gathered
        begin += sum(shares)
        if begin == len(pieces):
            return
        if number > 0:  # the first round is a warm-up
            rates = [
                share / took if share else rate
                for share, took, rate in zip(shares, seconds, rates or [0.0] * world_size, strict=True)
            ]
        if group.rank == 0 and now() - told_s >= _TELL_EVERY_S:
            told_s = now()
            left_s = (told_s - begun_s) / begin * (len(pieces) - begin)
            logger.info(
                "%s: %d of %d samples, %d:%02d left", what, pieces[begin][0], pieces[-1][1], *divmod(round(left_s), 60)
            )


def size_of_round(left: int, world_size: int, rates: Sequence[float]) -> int:
    """How many pieces the next round has: one per rank until rates are known, then half of the remaining ones.

    Halving lets later rounds correct a wrong rate. At most as many as all ranks do in `_ROUND_S` seconds, and at least
    one for each rank while there are as many.
    """
    if not rates:
        return min(left, world_size)
    most = min(_MOST * world_size, int(sum(rates) * _ROUND_S))
    return min(left, max(world_size, min(-(-left // 2), most)))


def _exchange(group: Group, seconds: float, answers: Sequence[bytes], *, most: int) -> tuple[list[float], list[bytes]]:
    """The seconds of every rank, above 0, and the answers of all in rank order. No rank has more than `most`."""
    head = np.zeros(1 + most, np.int64)  # nanoseconds, then 1 + bytes of each answer, 0 for none
    head[0] = max(1, round(seconds * 1e9))
    head[1 : 1 + len(answers)] = [1 + len(answer) for answer in answers]
    heads = group.all_gather_rows(head)  # (world_size, 1 + most)
    sizes = [[size - 1 for size in row[1:].tolist() if size] for row in heads]
    longest = max(map(sum, sizes))
    if longest:
        text = b"".join(answers).ljust(-(-longest // 8) * 8, b"\0")
        bodies = group.all_gather_rows(np.frombuffer(text, np.int64))
    gathered = []
    for rank, of_rank in enumerate(sizes):
        body, at = bodies[rank].tobytes() if longest else b"", 0
        for size in of_rank:
            gathered.append(body[at : at + size])
            at += size
    return [row[0] / 1e9 for row in heads.tolist()], gathered
