"""Watch: ends a job on all ranks, with one report, when a rank fails or stays away.

[Note: watch] A thread of each rank sleeps nearly always. A few times a second it looks at the
status of the rank, at the processes of this machine, and into the key-value store, on a separate
connection. It waits some seconds for an answer, and looks on without one.

1. An activity takes longer than it may, a process of this machine has ended, or the thread of verbs
   calls `fail`: the rank raises the alarm, a key in the store. The first one counts.
2. All ranks see the alarm within half a second, and each posts its `Record`.
3. The rank of the alarm waits some seconds for the records, finds the cause in them, and posts the
   report. The rank whose error is the cause shows it, or else the rank of the alarm. A rank that
   cannot reach the store reports from its own record alone.
4. The thread of verbs looks at the alarm in each wait (`waits`), and raises a StallError with the
   cause. It is never interrupted in code of its user. Waits inside torch end because the
   connections of this rank are closed. Only `pipegrad train` and `launch` end the process then,
   because any other process belongs to its user.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from pipegrad.comm import plain
from pipegrad.comm.absent import AbsentRanks
from pipegrad.comm.activity import (
    Account,
    Activity,
    Record,
    has_lost_connection,
)
from pipegrad.comm.agreement import STORE_IS_GONE
from pipegrad.comm.ending import cut_all
from pipegrad.comm.failures import ENDED, FailureReport, make_report
from pipegrad.comm.store import SignedStore, store
from pipegrad.comm.waits import let_block, look_with
from pipegrad.errors import AgreementError, MessageError, StallError, following
from pipegrad.printable import say

_POLL_SECONDS, _QUICK_SECONDS, _TICK_SECONDS, _JOIN_SECONDS = 0.5, 0.1, 0.02, 1.0
_ANSWER_SECONDS = 8.0  # for all ranks to post their records
_REPORT_SECONDS = 4.0  # then for the report
_LIMIT_SECONDS = _ANSWER_SECONDS + 2 * _REPORT_SECONDS
_LEAVE_SECONDS = 5.0  # for the thread of verbs to take the report; then for the process to end
_SIGN_SECONDS = 5.0  # without a new sign of a debugger: who gave it has ended
_NO_STORE = "the key-value store does not answer: who keeps it has ended, or the network is cut"
_watches: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


class State(IntEnum):
    """The state of a watch; it only increases."""

    WATCHING = 0  # this rank has seen no failure
    ALARM = 1  # a rank has failed
    REPORTED = 2  # the report is there
    TAKEN = 3  # the thread of verbs goes on with it
    LEFT = 4  # this rank may end, and that is no failure; only after WATCHING


class Watch:
    """The watch of this rank under one default process group; see [Note: watch].

    Attributes:
        show: A function that gets the report, on the rank that shows it; prints it by default.
        ends_process: Whether it may end this process, and a process of this machine that ends
            without `leave` raises the alarm.
        last_verb: The last verb that succeeded on this rank; ranks that wait for it read this.
        absent: Warns early of ranks that do not come.
    """

    def __init__(self) -> None:
        self.rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.show: Callable[[FailureReport], object] = lambda report: say(f"Error: {report.shown}")
        self.ends_process, self.last_verb = False, "its set-up"
        self._world = ref(dist.group.WORLD)
        # A wait of another thread holds its connection to the store until it ends.
        self._store = store().clone(_REPORT_SECONDS)
        # Each watch has separate keys, because a store may outlive a process group, and still have
        # its alarm. All ranks have the same number, because all make each watch.
        life = self._store.count(f"pipegrad/watch/lives/{self.rank}")
        self._prefix = f"pipegrad/watch/{life}"
        self._neighbours = Neighbours(self._store, self._key("process"), self.rank)
        self.absent = AbsentRanks(self._store, self._key("stand"), self.rank)
        self._left = set[int]()  # neighbours
        self._account = Account(self.rank)
        self._state, self._moved = State.WATCHING, threading.Condition()
        self._alarm, self._report = "", FailureReport("", "", self.rank)
        self._is_debugged = False  # this rank, or one for which it waits
        self._sign, self._sign_since = b"", 0.0  # of a debugger of another rank, and since when
        self._make_report = partial(make_report, reporter=self.rank, draw=self._account.draw)
        self._threads = [_started("watch", self._run)]

    # Calls of the thread of verbs.

    def fail(self, error: BaseException, note: str = "", words: str = "") -> FailureReport:
        """Raises the alarm for a final failure of this rank; returns the report of the job.

        It takes some seconds at most. In the report the note follows the error, if that is the
        cause, and the words follow the cause, if that is another rank.
        """
        self._account.fail(error, note)
        self._raise_alarm(words)
        return self.report()

    def report(self) -> FailureReport:
        """Returns the report of an alarm, when it is there; the caller goes on with it."""
        if not self._comes_to(State.REPORTED, _LIMIT_SECONDS):
            self._report_alone(_NO_STORE)
        self._go(State.TAKEN)
        return self._report

    def look(self) -> None:
        """Raises StallError if a rank has raised the alarm; the thread of verbs calls it often."""
        if (late := self._late()) is not None:
            self._raise_alarm(late)  # the other thread may be blocked
        if self.has_alarm:
            raise StallError(self.report().line)

    @property
    def has_alarm(self) -> bool:
        """True if a rank has raised the alarm, and this rank has seen it."""
        return State.WATCHING < self._state < State.LEFT

    def has_alarm_soon(self) -> bool:
        """Returns `has_alarm`, after the time in which a process that ended here is noticed."""
        return self._comes_to(State.ALARM, 2 * _POLL_SECONDS) and self.has_alarm

    def leave(self) -> None:
        """Ends the watch of this rank: an end of its process is no failure from now on."""
        with self._moved:
            leaves = self._state is State.WATCHING
            self._go(State.LEFT if leaves else self._state)
        if leaves:  # the network may be cut
            self._threads.append(_started("watch end", self._tell_end))
        for thread in {*self._threads} - {threading.current_thread()}:
            thread.join(_JOIN_SECONDS)

    def _tell_end(self) -> None:
        with suppress(Exception):
            self._store.set(self._key("left", self.rank), self.last_verb)

    def come_to_end(self) -> None:
        """Posts for the other ranks that the launcher may end this process."""
        with suppress(Exception):  # the store may be gone
            self._store.set(self._key("end", self.rank), "")

    def wait_for_end(self, seconds: float) -> None:
        """Waits until all ranks have come to their end, at most so long."""
        with suppress(Exception):
            keys = [self._key("end", rank) for rank in range(self._num_ranks)]
            deadline = time.monotonic() + seconds
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_TICK_SECONDS)

    # The state.

    def _go(self, state: State) -> None:
        with self._moved:
            self._state = max(self._state, state)
            self._moved.notify_all()

    def _comes_to(self, state: State, seconds: float | None = None) -> bool:
        """Waits for a state, at most so long; returns whether the watch has come to it."""
        with self._moved:
            return self._moved.wait_for(lambda: self._state >= state, seconds)

    def _raise_alarm(self, words: str) -> None:
        with self._moved:
            if self._state is State.WATCHING:
                self._alarm = words
                self._go(State.ALARM)

    def _take(self, report: FailureReport, *, shows: bool = False) -> None:
        """Stores the first report as the report of the job, and wakes the thread of verbs."""
        with self._moved:
            # The user sees one report, although the store may answer after this rank has reported
            # alone.
            if self._report.cause:
                return
            self._report = report
        if shows:
            self._show(report)
        report.tell_launcher()
        self._go(State.REPORTED)

    # The thread that reads the store.

    def _run(self) -> None:
        let_block()
        pause = _QUICK_SECONDS  # a rank may end at once
        while not self._comes_to(State.ALARM, pause):
            # No error may end the watch. The process that keeps the store may have ended because
            # the job is done. If it is not done, waits fail.
            try:
                pause = self._look()
            except MessageError:
                self._raise_alarm("")
            except Exception:  # noqa: BLE001 - see above
                pause, self._is_debugged = _POLL_SECONDS, False
        if self.has_alarm:
            try:
                self._exchange()
            except Exception as error:  # noqa: BLE001 - a report must come, whatever is wrong
                is_store = isinstance(error, dist.DistError | RuntimeError)
                has_lost = isinstance(error, dist.DistNetworkError)
                self._report_alone(_NO_STORE if is_store else repr(error), has_lost_store=has_lost)
            self._end()

    def _look(self) -> float:
        """Looks once; returns the seconds to sleep then."""
        self._account.look(counts=not self._is_debugged)
        if dist.group.WORLD is not self._world():
            self.leave()  # another default process group has another watch
            return 0.0
        try:
            have_come = self._neighbours.learn()
            self._is_debugged = self._is_one_debugged()
            self.absent.look(self._account)
            if self._has_lost_rank():
                waits = self._account.doing[:1] if self._account.awaited(0) else []
                self._raise_alarm("".join(f"Rank {self.rank} waits in {x}" for x in waits))
            elif self._store.check([self._key("alarm")]):
                self._raise_alarm("")
        finally:  # the store may not answer
            if (late := self._late()) is not None:
                self._raise_alarm(late)
        return _POLL_SECONDS if have_come else _QUICK_SECONDS

    def _late(self) -> str | None:
        with suppress(RuntimeError):  # threads of verbs change the activities during the read
            return None if self._is_debugged else self._account.late()
        return None

    def _end(self) -> None:
        """Ends the waits inside torch, and the process, if it may."""
        if dist.group.WORLD is not self._world():
            return  # another default process group has another watch, and other groups
        if self.ends_process:
            # A thread of C ends the process, because gloo may wait for a stopped rank when a group
            # is destroyed, and may hold Python's lock then.
            faulthandler.dump_traceback_later(3 * _LEAVE_SECONDS, exit=True)
        if not self._comes_to(State.TAKEN, _POLL_SECONDS):
            # In a thread, because NCCL may block in it. `leave` joins it at exit.
            self._threads.append(_started("watch cut", cut_all))
        if self.ends_process and dist.group.WORLD is self._world():
            time.sleep(_LEAVE_SECONDS * self._comes_to(State.TAKEN, _LEAVE_SECONDS))
            os._exit(self._report.exit_code)

    def _is_one_debugged(self) -> bool:
        """Returns True if this rank is in a debugger, or it is late and another one is."""
        key, now = self._key("debugger"), time.monotonic()
        if self._account.is_debugged:
            self._store.set(key, f"{self.rank} {now}")
            return True
        # Read the store only when half of the time is over, because most waits end long before,
        # and cost no message then.
        if self._account.late(share=0.5) is None or not self._store.check([key]):
            return False
        # A rank that has ended in its debugger gives no new sign.
        if (sign := self._store.get(key)) != self._sign:
            self._sign, self._sign_since = sign, now
        return now - self._sign_since < _SIGN_SECONDS

    def _has_lost_rank(self) -> bool:
        """Returns True if a rank has ended without `leave`, or before the verb of this rank."""
        awaited = {*self._account.awaited(2 * _POLL_SECONDS)} - {self.rank}
        for rank in awaited.union(self._neighbours.known if self.ends_process else ()):
            has_ended = rank not in self._left and self._neighbours.state(rank) == "ended"
            if has_ended or rank in awaited:
                has_left = self._store.check([left := self._key("left", rank)])
                self._left.update([rank] * has_left)
                if has_ended and not has_left:
                    return True
                # No alarm if that rank has ended after the verb in which this one is, because it
                # has sent all of its part.
                is_awaited = has_left and rank in awaited
                if is_awaited and self._store.text(left) not in self._account.doing:
                    return True
        return False

    def _exchange(self) -> None:
        """Posts the status of this rank; makes the report, or reads it."""
        first = self._store.set_first(self._key("alarm"), f"{self.rank} {self._alarm}")
        number, _, words = first.decode().partition(" ")
        self._store.set(self._key("state", self.rank), plain.dumps(self._account.record()))
        key, deadline = self._key("report"), time.monotonic() + _ANSWER_SECONDS + _REPORT_SECONDS
        if int(number) == self.rank:
            self._neighbours.learn()
            records = self._answers()
            silent = {r: self._sign_of(r) for r in range(self._num_ranks) if r not in records}
            report = self._make_report(records, silent, alarm=words)
            # Show it in this thread, because the thread of verbs may never come back. Do not show
            # a common error, because each rank raises it.
            if report.kind != "common" and report.reporter == self.rank:
                self._show(report)
            message = report.cause, report.text, report.reporter, report.kind
            self._store.set(key, plain.dumps(message))
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                self._report_alone(f"rank {number} has not made its report")
                return
            time.sleep(_TICK_SECONDS)
        report = FailureReport(*plain.loads(self._store.get(key), tuple))
        is_shown = report.kind == "common" or int(number) == report.reporter
        self._take(report, shows=self.rank == report.reporter and not is_shown)

    def _answers(self) -> dict[int, Record]:
        """Returns the records of the ranks that answer in time."""
        records, silent = dict[int, Record](), set(range(self._num_ranks))
        now = time.monotonic()
        deadline, known_by = now + _ANSWER_SECONDS, now + 3 * _POLL_SECONDS
        while silent and time.monotonic() < deadline:
            for rank in sorted(silent):
                if self._store.check([key := self._key("state", rank)]):
                    records[rank] = plain.loads(self._store.get(key), Record)
                    silent.remove(rank)
            # Give up silent ranks only after some looks, and only if all of them have ended or are
            # stopped, because others may still answer.
            if time.monotonic() > known_by and silent <= self._neighbours.gone():
                break
            time.sleep(_TICK_SECONDS)
        return records

    def _sign_of(self, rank: int) -> str:
        """Returns a description of a rank that has not answered."""
        left = self._key("left", rank)
        if self._store.check([left]):
            return f"{ENDED} {self._store.text(left)}"
        return self._neighbours.sign(rank)

    def _report_alone(self, reason: str, *, has_lost_store: bool = False) -> None:
        """Reports from this rank alone, which cannot reach others. One of a machine shows it."""
        gone = self._neighbours.gone()
        silent = {rank: self._neighbours.sign(rank) for rank in sorted(gone - self._left)}
        is_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if has_lost_store and self.rank and not is_of_torchrun:
            keeps = "keeps the key-value store: it has ended, or the connection to it is lost"
            silent, reason = {0: keeps} | silent, ""
        try:
            record = self._account.record()
        except Exception as error:  # noqa: BLE001 - there must be a report
            record, reason = Record(self.rank, ""), repr(error)
        words = ". ".join(part for part in (self._alarm, reason) if part)
        report = self._make_report({self.rank: record}, silent, alarm=words)
        lower = self._neighbours.known.keys() & range(self.rank)
        self._take(report, shows=lower <= gone | {*silent})

    def _show(self, report: FailureReport) -> None:
        with suppress(Exception):  # stderr may be closed; the exchange must go on
            self.show(report)

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])


def watch() -> Watch | None:
    """Returns the watch of the default process group; None without one, and for one rank alone.

    Every rank of the group must call it. The first call begins to watch.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _watches:
        try:
            _watches[world] = Watch()
        except dist.DistNetworkError as gone:
            raise following(AgreementError(f"the watch: {STORE_IS_GONE}")) from gone
    return _watches[world]


def _current() -> Watch | None:
    world = dist.group.WORLD
    return None if world is None else _watches.get(world)


def _look() -> None:
    if (ours := _current()) is not None:
        ours.look()


look_with(_look)


class Bounded(Activity):
    """An activity that a watch ends if it takes too long. It is part of a verb.

    After an alarm of any rank, it raises a StallError with the cause. A lost connection is an
    alarm, because no rank can go on without the lost one.
    """

    __slots__ = ()

    def __enter__(self) -> Activity:
        _look()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        error, ours = raised[1], _current()
        if ours is None or isinstance(error, StallError) or not isinstance(error, Exception | None):
            return
        if error is None and self.within_seconds is not None and not self.ranks:
            ours.last_verb = self.what
        if ours.has_alarm:
            # Also in a verb that has ended well, because other ranks end after an alarm.
            raise StallError(ours.report().line) from error
        if error is not None and has_lost_connection(error):
            # A symptom: another rank has ended, or its machine is gone. The watch finds the cause.
            words = f"Rank {ours.rank} lost the connection in {self.what}"
            raise StallError(ours.fail(error, words=words).line) from error


def _started(name: str, target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, name=f"pipegrad {name}", daemon=True)
    thread.start()
    return thread


@atexit.register
def _at_exit() -> None:
    # Python would end these threads inside of torch, which aborts the process.
    for each in list(_watches.values()):
        each.leave()


_SIGNS = {
    "": "does not answer: its process or machine has ended or is stopped, or its network is cut",
    "ended": "has ended without a word (process {pid})",
    "stopped": "is stopped (process {pid}), by a signal such as SIGSTOP, or by a debugger",
    "running": "does not answer, though its process {pid} runs: code that holds the interpreter "
    "lock, or a machine without memory or processor time",
}


class Neighbours:
    """The processes of the other ranks of this machine; each posts its number in the store.

    Attributes:
        known: Number and start time of a process, by rank.
    """

    def __init__(self, store: SignedStore, prefix: str, rank: int) -> None:
        self.known: dict[int, tuple[int, str]] = {}
        self._store, self._prefix = store, prefix
        self._machine, pid = _machine(), os.getpid()
        store.set(f"{prefix}/{rank}", f"{pid} {process_state(pid)[1]} {self._machine}")
        local, num_local = (os.environ.get(f"LOCAL_{name}") for name in ("RANK", "WORLD_SIZE"))
        first = rank - int(local or 0)
        self._unread = {*range(first, first + int(num_local or 1))} - {rank}

    def learn(self) -> bool:
        """Reads the processes that have come; returns True if all have."""
        for rank in [r for r in self._unread if self._store.check([f"{self._prefix}/{r}"])]:
            pid, began, machine = self._store.text(f"{self._prefix}/{rank}").split(" ", 2)
            if machine == self._machine != "":
                self.known[rank] = int(pid), began
            self._unread.remove(rank)
        return not self._unread

    def state(self, rank: int) -> str:
        """Returns ``"ended"``, ``"stopped"``, ``"running"``, or "" if the state is unknown."""
        if rank not in self.known:
            return ""
        letter, began = process_state(self.known[rank][0])
        if letter != "?" and (began != self.known[rank][1] or letter in "ZX"):
            return "ended"
        return "stopped" if letter in "Tt" else "running"  # or unreadable

    def gone(self) -> set[int]:
        """Returns the ranks whose processes cannot answer."""
        return {rank for rank in self.known if self.state(rank) in ("ended", "stopped")}

    def sign(self, rank: int) -> str:
        """Returns a description of a process that has not answered."""
        return _SIGNS[self.state(rank)].format(pid=self.known.get(rank, (0,))[0])


def _machine() -> str:
    """Returns the name of this machine, and the namespace of its process numbers."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # the start of a process cannot be read
        return ""


def process_state(pid: int) -> tuple[str, str]:
    """Returns the state of a process, a letter, and its start time, in ticks; "" if unknown."""
    try:
        # The name of the program stands in brackets before, and may have any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    except OSError:  # unreadable, for example without a free file descriptor
        return "?", ""
    return fields[0], fields[19]
