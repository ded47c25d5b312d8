"""No wait without a deadline: a walk over the syntax trees of `hetseq/` that knows the calls that can wait for ever.

It knows calls by name and arguments, and mostly not by what they are called on: `join()` with nothing in it waits for a
thread, `join(words)` makes a text. A time that may be None is no deadline. What it finds all the same stands in
`HARMLESS`, with why it ends; and every lock in `LOCKS`, with why nobody holds it for long.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

#: module; function, call: why it ends, although nothing there says when
HARMLESS = """
hetseq/cluster/rendezvous/byte_stream.py
    StreamDoor.accept: _listener.accept: the socket does not block
    FrameReader._read_some: connection.recv: the socket does not block
hetseq/run/shadow_links.py
    ShadowLinks.wait: _bell.recv: a byte is there
    ShadowLinks.wait: _door.accept: the socket does not block
hetseq/run/shadow_outlet.py
    StateMessage.settle: _copied.wait: the thread copies memory, and waits for nobody
    StateMessage.frames: _copied.wait: as above; a thread of its own waits here
    Outlet._serve: _changed.wait_for: an idle thread; `close` wakes it
hetseq/loop/whole.py
    Whole._gathered: wait.wait: the collective got the deadline of its group
hetseq/comm/slices.py
    TaggedSlices._post: future.result: the thread waits for the GPU, then posts without waiting
hetseq/comm/serial_thread.py
    SerialThread._serve: _tasks.get: an idle thread; `end` gives it None
hetseq/parallel/owned_gradients.py
    OwnedGradients._await_gathers: transfer.wait: a transfer has the deadline of its group
hetseq/parallel/owned_units.py
    OwnedUnits._collect: unit.sending.wait: as above
    OwnedUnits._take_from_rank_zero: exchange.sum_to_owners(given, mine, bounds=bounds, givers=(0,)).wait: as above
hetseq/parallel/owned_parameters.py
    OwnedParameters._await: transfer.wait: as above
    OwnedParameters._end_round: transfer.wait: as above
hetseq/parallel/group_sums.py
    GroupSum._end: _transfer.wait: as above
hetseq/parallel/offload_tiers.py
    DiskTier.bring: read.result: the thread reads, and waits for the disk alone
    DiskTier._read: written.result: the thread writes, and waits for the disk and the GPU alone
    _InFile.has_left: _written.result: as above
hetseq/parallel/state_move.py
    _exchange_unit: exchange.swap(outgoing, incoming).wait: as above
hetseq/parallel/tensor_ranks.py
    TensorRanks.sum: group.all_reduce_sum(total).wait: as above
hetseq/parallel/whole_tensors.py
    _exchange: exchange.swap(messages, incoming).wait: as above
hetseq/run/foreign_parts.py
    _send: exchange.swap(outgoing, incoming).wait: as above
hetseq/parallel/buffers.py
    BufferKeeper.finish: _pending.wait: the collective got the deadline of its group
hetseq/checkpoint/part_writer.py
    PartWriting.run: summing.join: the thread computes, and waits for nobody but the disk
hetseq/checkpoint/part_io.py
    copy_part: with PoolExecutor: the thread computes, and waits for nobody but the disk
    copy_part: done.result: the thread computes, and waits for nobody but the disk
    _Pass.run: other.join: whoever reads has put in the last word on both roads out
    _Pass._check_all: _unchecked.get: as above; the thread that reads puts something in for each chunk, or the
        last word
hetseq/checkpoint/shared_read.py
    _take_all: with PoolExecutor: the threads compute, and wait for nobody but the disk
    _take_all: done.result: the threads compute, and wait for nobody but the disk
hetseq/checkpoint/snapshot.py
    Snapshot.finish: copying.join: the thread computes, and waits for nobody but the disk
    Snapshot.close: _thread.join: its last task is None, and the others compute
    Snapshot.close: copying.join: the thread that copies has ended just before
    Snapshot._serve: _tasks.get: an idle thread; `close` gives it None
    _Copying._wait: event.wait: a copy sets it on both roads out
hetseq/checkpoint/writer.py
    MessagePipe.send: _connection.sendall: the trainer's end has SO_SNDTIMEO; a writer has nothing better to do than to
        wait for its trainer
    MessagePipe.listen: select.select: whoever calls it may choose to wait; a writer does, until its trainer ends
    MessagePipe.listen: _connection.recv: select has found something to read
    Writer.serve: _line.take: a process that waits for work; the end of its trainer closes the line
    Writer._write_politely: thread.join: the thread computes, and waits for nobody but the disk
    main: line.take: a process that waits for work; the end of its trainer closes the line
    MessagePipe.take: listen: whoever calls it may choose to wait; as `MessagePipe.listen`
hetseq/cluster/rendezvous/channel.py
    Listener._let_in: _socket.accept: the socket never waits
hetseq/cluster/membership/run_directory_discovery.py
    _is_there: os.read: a file
hetseq/cluster/membership/coordinator_server.py
    _Tray.take: os.read: the tray held a record, and its bell a byte
    HubServer.close: thread.join: the thread was told to end, and every wait of its own has a deadline
    HubServer._serve: thread.join: each says goodbye for a second
    HubServer._hear: os.read: the bell was found readable, and nobody else reads it
hetseq/cluster/rendezvous/interfaces.py
    route_address: asking.connect: a socket for datagrams connects to nobody
hetseq/cluster/rendezvous/connectivity.py
    Doorstep.close: _thread.join: the thread was told to end, and every wait of its own has a deadline
    probe: with PoolExecutor: each knock has a deadline
hetseq/cluster/rendezvous/meet.py
    _Calls.beside: thread.join: its outcome is there
    _Calls.beside: outcome.result: it is done
    _close_result: outcome.exception: it is done
    _close_result: outcome.result: it is done
hetseq/cluster/rendezvous/secret.py
    _read: os.read: a file, opened with O_NONBLOCK
hetseq/cluster/rendezvous/sockets.py
    take: connection.recv: the socket never waits
hetseq/comm/group.py
    connect: building.result: it is over
    GlooGroup._await: work.wait: the collective has ended; before that each look at it has a deadline
hetseq/commands/demo.py
    _make_corpus: subprocess.run: the user looks on, and Ctrl-C ends both
hetseq/commands/doctor/all_reduce_child.py
    _timed: group.all_reduce_sum(tensor).wait: the collective got the deadline of its group
hetseq/commands/doctor/node_agent.py
    Door._serve: _socket.accept: the socket never waits
    _drain: connection.recv: the socket never waits
hetseq/commands/doctor/all_reduce_client.py
    Participant._speak: _said.get: an idle thread; `close` gives it None
hetseq/commands/ssh/host_agent.py
    _run: child.poll: of a process, looks once
    _run: os.read: select has found something to read
hetseq/commands/ssh/remote.py
    _Near.look: os.read: select has found something to read
    _look_after: child.poll: of a process, looks once
hetseq/system/faults.py
    _stop: os.waitpid: it was killed just before; and tests alone come here
hetseq/launch/launcher.py
    Launcher._beside: future.result: it is done
    Launcher._wait: os.read: the bell was found readable, and nobody else reads it
    Launcher._pause_in_training: os.read: the bell was found readable, and nobody else reads it
    Launcher._watch: os.read: the bell was found readable, and nobody else reads it
    Launcher._last_words: os.read: the bell was found readable, and nobody else reads it
    Launcher._wait_for_verdict: wait: the others train, which may take days; the kernel ends the channel of a head
        that is gone, and a signal ends the wait
hetseq/launch/launcher_link.py
    LauncherLink.send: _connection.send_bytes: the launcher reads all the time; when it ends, this process is killed
    LauncherLink._listen: _connection.recv_bytes: a thread that listens; the launcher reads all the time; when it ends,
        this process is killed
hetseq/monitor/metrics.py
    _Recorder._run: _wakeup.wait_for: an idle thread; `close` leaves it behind at its deadline
hetseq/nebula/courier.py
    Courier.close: _thread.join: a writer that says nothing for 900 s, or takes nothing for 10, is given up
    Courier._run: _changed.wait: an idle thread; `close` wakes it
    Courier._carry: _writer.answer: a writer that says nothing for 900 s, or takes nothing for 10, is given up
hetseq/nebula/api.py
    flush_persistence: _script.service.flush: whoever calls it may choose to wait; a writer that says nothing for
        900 s, or takes nothing for 10, is given up
hetseq/nebula/ranks.py
    of_rank_zero: distributed.broadcast: the process group is the script's, with the deadline that it was given there
hetseq/sagemaker/ranks.py
    ensure_process_group: dist.init_process_group: torch's own deadline, 30 minutes of gloo and 10 of NCCL
hetseq/nebula/checkpoint.py
    Checkpoint.wait: _service.wait: whoever calls it may choose to wait; a writer that says nothing for 900 s, or
        takes nothing for 10, is given up
    Checkpoint.load: _service.wait: a writer that says nothing for 900 s, or takes nothing for 10, is given up
hetseq/nebula/service.py
    Service.wait: _changed.wait_for: whoever calls it may choose to wait; a writer that says nothing for 900 s, or
        takes nothing for 10, is given up
    Service.close: flush: a writer that says nothing for 900 s, or takes nothing for 10, is given up
hetseq/nebula/writer.py
    TagWriter.serve: _line.take: a process that waits for work; the end of its trainer closes the line
    TagWriter._write_politely: thread.join: the thread computes, and waits for nobody but the disk
    main: line.take: a process that waits for work; the end of its trainer closes the line
hetseq/comm/shared_memory.py
    SharedMemoryRanks._take: socket.recv_fds: the socket never waits
    SharedMemoryRanks._tell: socket.send_fds: the socket never waits
hetseq/system/processes.py
    _die_once_readable: wait: a thread that waits for the end of the launcher, to end too
hetseq/parallel/gradient_sync.py
    GradientReducer.finish: bucket.pending.wait: the collective got the deadline of its group
hetseq/system/terminal.py
    keys.is_quit: os.read: the terminal was found readable, and nobody else reads it
hetseq/commands/ssh/connections.py
    Connections.turn: os.read: the selector has found something to read
    Connections._receive: os.read: the selector has found something to read
hetseq/launch/worker_processes.py
    Worker.tell: _channel.send_bytes: the pipe has SO_SNDTIMEO
    Worker.listen: _channel.recv_bytes: poll has found something, and for the rest the pipe has SO_RCVTIMEO
"""
BRIEF = "held for a few lines that wait for nothing"
#: module; lock: why nobody who takes it is kept waiting
LOCKS = """
hetseq/run/shadow_outlet.py
    _changed: held for a few lines that wait for nothing
hetseq/run/after_step.py
    _writing: held while a status file is written; a mount that hangs holds whoever writes it, lock or not
hetseq/checkpoint/writer.py
    _sending: held while a line is sent, whose end `HARMLESS` tells
hetseq/checkpoint/writer_client.py
    _lock: held while a line is sent, as above
hetseq/cluster/rendezvous/channel.py
    _accepting: `accept` holds it until its deadline, and `close` wakes it before
    _receiving: `receive` holds it until its deadline, and `close` wakes it before
    _sending: `send` holds it until its deadline, and `close` wakes it before
hetseq/cluster/membership/coordinator_server.py
    _turn: held while a byte is read that is there
hetseq/comm/group.py
    _lock: held for a few lines that wait for nothing
hetseq/comm/messages.py
    _lock: held for a few lines that wait for nothing
hetseq/comm/right_of_way.py
    _changed: held for a few lines that wait for nothing
hetseq/checkpoint/images.py
    _lock: held for a few lines that wait for nothing
hetseq/commands/doctor/all_reduce_child.py
    _changed: held for a few lines that wait for nothing
    _sending: held while a line is written, which the doctor reads all the time; when it ends, this process is killed
hetseq/system/faults.py
    _lock: held for a few lines that wait for nothing
hetseq/data/fetch_schedule.py
    _lock: held for a few lines that wait for nothing
hetseq/launch/launcher_link.py
    _changed: held for a few lines that wait for nothing
    _sending: held while a word is sent, whose end `HARMLESS` tells
hetseq/monitor/metrics.py
    _wakeup: held for a few lines that wait for nothing
hetseq/monitor/trackers/thread.py
    _wakeup: held for a few lines that wait for nothing
hetseq/nebula/courier.py
    _changed: held for a few lines that wait for nothing
hetseq/nebula/service.py
    _calls: one call of the script at a time; the longest ends as a writer's silence does
    _changed: held for a few lines that wait for nothing
"""

_LOCKS = ("threading.Lock", "threading.RLock", "threading.Condition", "threading.Semaphore")
#: methods -> after how many positional arguments comes the time
_TIMED = {"join": 0, "wait": 0, "wait_for": 1, "result": 0, "exception": 0, "select": 0}
#: functions by their full names -> the same
_TIMED_FUNCTIONS = {
    "multiprocessing.connection.wait": 1, "concurrent.futures.wait": 1, "concurrent.futures.as_completed": 1,
    "select.select": 3, "socket.create_connection": 1, "asyncio.wait": 1, "asyncio.wait_for": 1,
    "torch.distributed.init_process_group": 2,
}  # fmt: skip
_STARTED = re.compile(r"subprocess\.(run|call|check_call|check_output)$")
_ENDLESS = re.compile(
    r"(os\.(wait|wait3|read|mkfifo)|signal\.(pause|sigwait|sigwaitinfo)|input|builtins\.input|socket\.(recv_fds|send_fds)"
    r"|torch\.distributed\.(all_reduce|all_gather\w*|all_to_all\w*|broadcast\w*|reduce\w*|gather\w*|scatter\w*|barrier"
    r"|send|recv))$"
)
#: of sockets, which wait unless they were told not to
_OF_SOCKETS = ("recv", "recv_into", "recvfrom", "recvmsg", "accept", "connect", "sendall", "sendmsg")
#: of pipes, which know no deadline
_OF_PIPES = ("recv_bytes", "recv_bytes_into", "send_bytes")
#: of torch's process groups, which take their deadline from the options
_COLLECTIVE = re.compile(r"(allreduce|allgather|alltoall|reduce_scatter|broadcast)(_\w+)?$")
#: our own, for which None means: for ever
_OURS = ("receive", "accept", "get", "poll")
_OURS_WITH_A_TIME = ("take", "answer", "flush", "listen", "wait")  # which is their last argument
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


def waits(tree: ast.Module) -> list[tuple[str, int, str]]:
    """The waits without a deadline: the function, the line, the call."""
    return sorted(_Walk(tree).found, key=lambda found: found[1])


class _Walk(ast.NodeVisitor):
    """One walk over a module: `found` is what `waits` gives, `locks` are the names of the locks that the module makes,
    `held` says in which function, where, which of them is held over one of these waits."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[str, int, str]] = []
        self._names: list[str] = []
        self._functions: list[_Function] = [tree]
        nodes = list(ast.walk(tree))
        self._short = _short_names(nodes)
        made = [node for node in nodes if isinstance(node, ast.Call)]
        self._has_full_queues = any(self._full(call.func) in ("queue.Queue", "Queue") and _given(call) for call in made)
        self.locks = self._locks_of(nodes)
        self.held: list[tuple[str, int, str]] = []
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node.name, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node)
        self._enter(node.name, node)
        self._functions.pop()

    def _enter(self, name: str, node: ast.AST) -> None:
        self._names.append(name)
        self.generic_visit(node)
        self._names.pop()

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and self._full(call.func).endswith("PoolExecutor"):
                self._find(call, "with PoolExecutor")
        before = len(self.found)
        self.generic_visit(node)
        for item in node.items:
            lock = _text(item.context_expr).removeprefix("self.")
            if lock in self.locks:
                inside = [call for _, _, call in self.found[before:] if call.partition(".")[0] != lock]
                self.held += [(".".join(self._names), node.lineno, lock)] if inside else []

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, (ast.Name, ast.Attribute)) and re.search(
            r"(^|[._])(stdin|stdout|stderr|pipe)$", _text(node.iter)
        ):
            self._find(node.iter, f"for in {_text(node.iter)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):
            return  # of a text
        if self._can_hang(node):
            self._find(node, _text(node.func).removeprefix("self."))

    def _find(self, node: ast.expr, what: str) -> None:
        self.found.append((".".join(self._names), node.lineno, what))

    def _can_hang(self, call: ast.Call) -> bool:
        full = self._full(call.func)
        if full in _TIMED_FUNCTIONS:
            return not self._has_deadline(call, _TIMED_FUNCTIONS[full])
        if _STARTED.match(full):
            return not self._has_deadline(call, 99)
        if _ENDLESS.match(full):
            return True
        if full == "os.waitpid":
            return "WNOHANG" not in _text(call)
        if full in ("fcntl.flock", "fcntl.lockf"):
            return not re.search(r"LOCK_(NB|UN)", _text(call))
        if not isinstance(call.func, ast.Attribute):
            return False
        return self._can_method_hang(call, call.func, full)

    def _can_method_hang(self, call: ast.Call, method: ast.Attribute, full: str) -> bool:
        name, on, given = method.attr, _text(method.value), _given(call)
        words = {word.arg for word in call.keywords}
        if self._is_collective(call, method):
            return not self._has_timed_options(call)
        if name == "wait" and isinstance(method.value, ast.Call) and _COLLECTIVE.match(_last(method.value.func)):
            return not self._has_timed_options(method.value)
        if name == "join" and re.match(r"(os|shlex|posixpath)\b", full):
            return False
        if name in _TIMED and (given == _TIMED[name] or (given == _TIMED[name] + 1 and self._is_time(call))):
            return not self._has_deadline(call, _TIMED[name])
        if name == "communicate":
            return not self._has_deadline(call, 1)
        if name == "acquire":
            return not ({"timeout", "blocking"} & words or given == 2 or _text(call).endswith("(False)"))
        if name == "get" and (given == 0 or _text(call).endswith("(True)")):
            return not self._has_deadline(call, 1)
        if name == "put" and self._has_full_queues:
            return not self._has_deadline(call, 2)
        if name == "poll" and given == 0:  # a pipe's and a process's look once
            return "select" in self._short.values() and full != "select.poll"
        if name in _OF_PIPES or (name == "recv" and given == 0):
            return True
        if name in _OF_SOCKETS and given == (name != "accept"):
            return not self._is_told_not_to_wait(on)
        times = [*call.args, *(word.value for word in call.keywords)]
        if name in _OURS_WITH_A_TIME and any(isinstance(time, ast.Name) and self._may_be_none(time) for time in times):
            return True
        return name in (*_OURS, *_OURS_WITH_A_TIME) and given <= 2 and any(map(_is_none, times))

    def _is_collective(self, call: ast.Call, method: ast.Attribute) -> bool:
        """As ProcessGroup has them: lists of tensors, then options."""
        return bool(_COLLECTIVE.match(method.attr)) and any(isinstance(argument, ast.List) for argument in call.args)

    def _has_timed_options(self, call: ast.Call) -> bool:
        names = [_text(argument) for argument in call.args]
        targets = (target for node in ast.walk(self._functions[-1]) for target in _targets(node))
        return any(_text(target) in [f"{name}.timeout" for name in names] for target in targets)

    def _is_time(self, call: ast.Call) -> bool:
        """Whether the last argument is what a time would be: no text, no list, no iteration."""
        return not isinstance(call.args[-1], (ast.List, ast.ListComp, ast.GeneratorExp, ast.JoinedStr, ast.Starred))

    def _has_deadline(self, call: ast.Call, place: int) -> bool:
        """Whether the argument in this place, or called timeout, is a time and cannot be None."""
        named = [word.value for word in call.keywords if word.arg in ("timeout", "timeout_s")]
        time = named[0] if named else call.args[place] if len(call.args) > place else None
        return time is not None and not self._may_be_none(time)

    def _may_be_none(self, time: ast.expr) -> bool:
        if not isinstance(time, ast.Name):
            return any(_is_none(node) for node in ast.walk(time))
        function = self._functions[-1]
        for node in ast.walk(function):
            if isinstance(node, ast.arg) and node.arg == time.id and re.search("None|Optional", _text(node)):
                return True
            value, is_it = getattr(node, "value", None), any(_text(target) == time.id for target in _targets(node))
            if is_it and isinstance(value, ast.expr) and any(map(_is_none, _results(value))):
                return True
        return False

    def _is_told_not_to_wait(self, on: str) -> bool:
        """Whether the same function gives this socket a time, or tells it never to wait."""
        for node in ast.walk(self._functions[-1]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _text(node.func.value) == on:
                if node.func.attr == "settimeout" and not _is_none(node.args[0]):
                    return True
                if node.func.attr == "setblocking" and _text(node.args[0]) == "False":
                    return True
        return False

    def _locks_of(self, nodes: list[ast.AST]) -> set[str]:
        found = set()
        for node in nodes:
            value = getattr(node, "value", None)
            for target in _targets(node):
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts))
                for name, made in pairs:
                    if isinstance(made, ast.Call) and self._full(made.func) in _LOCKS:
                        found.add(_text(name).removeprefix("self."))
        return found

    def _full(self, function: ast.expr) -> str:
        head, dot, rest = _text(function).partition(".")
        return self._short.get(head, head) + dot + rest


def _short_names(nodes: list[ast.AST]) -> dict[str, str]:
    """After `import x.y as z` z is x.y, after `from x import y` y is x.y."""
    short: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            short |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            short |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return short


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        nested = [target.elts if isinstance(target, ast.Tuple) else [] for target in node.targets]
        return [*node.targets, *(element for elements in nested for element in elements)]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) else []


def _results(value: ast.expr) -> list[ast.expr]:
    """What an expression may give: both sides of a condition."""
    return [*_results(value.body), *_results(value.orelse)] if isinstance(value, ast.IfExp) else [value]


def _given(call: ast.Call) -> int:
    return len(call.args)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _last(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ""


def _text(node: ast.AST) -> str:
    """As it would be written; names with dots, which are most, in less time than `ast.unparse` takes."""
    parts: list[str] = []
    part = node
    while isinstance(part, ast.Attribute):
        parts.append(part.attr)
        part = part.value
    return ".".join([part.id, *reversed(parts)]) if isinstance(part, ast.Name) else ast.unparse(node)


@functools.cache
def walks() -> dict[str, _Walk]:
    """By path, for all of `hetseq/`."""
    paths = sorted((ROOT / "hetseq").rglob("*.py"))
    return {str(path.relative_to(ROOT)): _Walk(ast.parse(path.read_text())) for path in paths}


# The house.


def reasons(table: str) -> dict[tuple[str, ...], str]:
    """Of a table as above: by module and the words before the reason."""
    found: dict[tuple[str, ...], str] = {}
    path = ""
    for line in re.sub(r"\n {8}", "", table).strip().splitlines():
        if line[0] != " ":
            path = line
        else:
            *words, why = line.strip().split(": ")
            found[(path, *words)] = why
    return found


def test_no_wait_is_without_a_deadline() -> None:
    harmless = reasons(HARMLESS)
    found = {(path, name, call): line for path, walk in walks().items() for name, line, call in walk.found}
    unknown = [
        f"{path}:{line}: {call} in {name}"
        for (path, name, call), line in found.items()
        if (path, name, call) not in harmless
    ]
    assert not unknown, "give it a deadline and words for when it passes; or write down in HARMLESS why it ends"
    stale = [words for words in harmless if words not in found]
    assert not stale, "what is not there any more needs no excuse"


def test_no_lock_is_held_for_long() -> None:
    locks = reasons(LOCKS)
    made = {(path, lock) for path, walk in walks().items() for lock in walk.locks}
    assert made == locks.keys(), "say of each lock why nobody who takes it is kept waiting"
    held = {(path, lock) for path, walk in walks().items() for _, _, lock in walk.held}
    assert not [where for where in held if locks[where] == BRIEF], "held over a wait"


# The walk.


def calls(text: str) -> list[str]:
    return [call for _, _, call in waits(ast.parse(text))]


#: each with what has a deadline, or is something else
PAIRS = [
    ("thread.join()", "thread.join(5.0)"),
    ("thread.join(None)", "', '.join(words)"),
    ("thread.join(timeout=None)", "os.path.join(a, b)"),
    ("pool.join()", "separator.join(map(str, words))"),
    ("event.wait()", "event.wait(timeout=1.0)"),
    ("changed.wait(None)", "changed.wait(left_s)"),
    ("changed.wait_for(lambda: is_over)", "changed.wait_for(lambda: is_over, 1.0)"),
    ("process.wait()", "process.wait(patience_s)"),
    ("lock.acquire()", "lock.acquire(timeout=1.0)"),
    ("lock.acquire(True)", "lock.acquire(False)"),
    ("records.get()", "fields.get(key)"),
    ("records.get(True)", "records.get(timeout=1.0)"),
    ("records.get(timeout=None)", "fields.get(key, 0)"),
    ("import queue\nqueue.Queue(1).put(item)", "import queue\nqueue.SimpleQueue().put(item)"),
    ("import queue\nqueue.Queue(1).put(item)", "import queue\nqueue.Queue(1).put(item, timeout=0.1)"),
    ("future.result()", "future.result(1.0)"),
    ("future.exception()", "future.exception(timeout=1.0)"),
    ("process.communicate()", "process.communicate(timeout=1.0)"),
    ("process.communicate(text)", "process.communicate(text, 1.0)"),
    ("import subprocess\nsubprocess.run(words)", "import subprocess\nsubprocess.run(words, timeout=1.0)"),
    ("from subprocess import check_output\ncheck_output(words)", "check_output(words)"),
    ("import select\nselect.select(a, b, c)", "import select\nselect.select(a, b, c, 0)"),
    ("import select\nselect.select(a, b, c, None)", "import select\nselect.select(a, b, c, left_s)"),
    ("import select\npoll.poll()", "connection.poll()"),
    ("poller.poll(None)", "poller.poll(100)"),
    ("selector.select()", "selector.select(1.0)"),
    (
        "from multiprocessing.connection import wait\nwait(sources)",
        "from multiprocessing.connection import wait\nwait(sources, timeout=1.0)",
    ),
    ("from multiprocessing.connection import wait\nwait(sources, None)", "wait(sources)"),
    ("from concurrent import futures\nfutures.wait(those)", "from concurrent import futures\nfutures.wait(those, 1.0)"),
    ("import os\nos.waitpid(pid, 0)", "import os\nos.waitpid(pid, os.WNOHANG)"),
    ("import os\nos.wait()", "wait()"),
    ("import os\nos.read(pipe, 64)", "file.read(64)"),
    ("import os\nos.mkfifo(path)", "import os\nos.mkdir(path)"),
    (
        "import fcntl\nfcntl.flock(file, fcntl.LOCK_EX)",
        "import fcntl\nfcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ),
    ("import fcntl\nfcntl.lockf(file, fcntl.LOCK_SH)", "import fcntl\nfcntl.lockf(file, fcntl.LOCK_UN)"),
    ("import signal\nsignal.pause()", "self.pause()"),
    ("import signal\nsignal.sigwait(those)", "import signal\nsignal.sigtimedwait(those, 1.0)"),
    ("input()", "read_input(text)"),
    ("connection.recv()", "channel.receive(1.0)"),
    ("channel.receive(None)", "channel.receive(left_s)"),
    ("connection.recv_bytes()", "connection.poll(1.0)"),
    ("connection.send_bytes(text)", "line.send(text)"),
    ("connection.recv(64)", "connection.settimeout(1.0)\nconnection.recv(64)"),
    ("connection.settimeout(None)\nconnection.recv(64)", "connection.setblocking(False)\nconnection.recv(64)"),
    ("connection.setblocking(True)\nconnection.connect(address)", "connect(address)"),
    ("other.settimeout(1.0)\nconnection.connect(address)", "connection.settimeout(1.0)\nconnection.connect(address)"),
    ("listening.accept()", "listener.accept(1.0)"),
    ("connection.recvfrom(64)", "connection.settimeout(left_s)\nconnection.recvfrom(64)"),
    ("connection.sendall(text)", "connection.setblocking(False)\nconnection.sendall(text)"),
    ("import socket\nsocket.create_connection(a)", "import socket\nsocket.create_connection(a, timeout=1.0)"),
    ("import socket\nsocket.recv_fds(c, 1, 1)", "import socket\nsocket.socket()"),
    ("import torch.distributed as dist\ndist.barrier()", "group.barrier_of(step)"),
    ("import torch.distributed as dist\ndist.all_reduce(t)", "group.all_reduce_sum(t)"),
    (
        "import torch.distributed as dist\ndist.init_process_group('gloo')",
        "import torch.distributed as dist\ndist.init_process_group('gloo', timeout=limit)",
    ),
    ("group.allreduce([tensor])", "options.timeout = limit\ngroup.allreduce([tensor], options)"),
    ("group.allreduce([tensor], options)", "options.timeout = limit\ngroup.broadcast([tensor], options).wait()"),
    ("other.timeout = limit\ngroup.allgather([a], [b], options).wait()", "broadcast(tensor)"),
    ("work.wait()", "work.wait(limit)"),
    ("for line in process.stdout: pass", "for line in lines: pass"),
    ("for line in pipe: pass", "for line in pipes: pass"),
    ("with ThreadPoolExecutor(2) as pool: pass", "with lock: pass"),
    ("line.take(None)", "line.take(1.0)"),
    ("writer.answer(timeout_s=None)", "writer.answer()"),
]


@pytest.mark.parametrize(("endless", "other"), PAIRS)
def test_a_wait_is_found_and_one_with_a_deadline_is_not(endless: str, other: str) -> None:
    assert calls(endless)
    assert not calls(other)


@pytest.mark.parametrize(
    ("head", "is_found"),
    [
        ("def f(left_s: float | None): ", True),
        ("def f(left_s: Optional[float]): ", True),
        ("def f(left_s: float): ", False),
        ("def f(x):\n left_s = None if x else 1.0\n ", True),
        ("def f(x):\n left_s = 2.0 if x is None else 1.0\n ", False),
        ("left_s = None\ndef f(x): ", False),  # another one, as far as the walk looks
    ],
)
def test_a_time_that_may_be_none_is_no_deadline(head: str, is_found: bool) -> None:
    for call in ("event.wait(left_s)", "thread.join(timeout=left_s)", "line.take(left_s)"):
        assert bool(calls(head + call)) == is_found
    assert not calls(head + "fields.get(key, left_s)")


def test_a_wait_is_told_by_its_function_and_line() -> None:
    text = "class A:\n def f(self):\n  def g():\n   self.thread.join()\n  self.event.wait()\ninput()"
    assert waits(ast.parse(text)) == [("A.f.g", 4, "thread.join"), ("A.f", 5, "event.wait"), ("", 6, "input")]


def test_a_lock_that_is_held_over_a_wait_is_found_and_waiting_for_its_own_condition_lets_it_go() -> None:
    made = "import threading\nclass A:\n def __init__(self):\n  self.lock, self.x = threading.{}(), 1\n"
    walk = _Walk(ast.parse(made.format("Lock") + " def f(self):\n  with self.lock:\n   self.thread.join()"))
    assert (walk.locks, walk.held) == ({"lock"}, [("A.f", 6, "lock")])
    walk = _Walk(ast.parse(made.format("Condition") + " def f(self):\n  with self.lock:\n   self.lock.wait()"))
    assert (walk.locks, walk.held) == ({"lock"}, [])
    assert [call for _, _, call in walk.found] == ["lock.wait"]
    walk = _Walk(ast.parse(made.format("Lock") + " def f(self):\n  with self.file:\n   self.thread.join()"))
    assert walk.held == []
