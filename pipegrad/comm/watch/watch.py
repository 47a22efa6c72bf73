"""Watch: ends a job on all ranks, with one report, when a rank fails or stays away.

[Note: watch] Two threads of each rank sleep nearly always. One looks at the activities of the rank;
it never blocks. The other looks at the processes of this machine and talks to the key-value store,
on a connection of its own. It may block if the network is gone.

1. An activity takes longer than it may, a process beside this one has ended, or the main thread
   calls `fail`: the rank raises the alarm, a key in the store. The first one counts.
2. All ranks look for the alarm twice a second. When they find it, each posts what it is at.
3. The rank that has raised the alarm waits some seconds for these answers, makes the report of
   them, and posts it. A rank without an answer is dead, stopped or cut off, and the report says so.
4. Every rank takes the report. A rank that cannot reach the store makes one of what it knows.
5. The connections of this rank are closed, so that waits of the main thread fail. The main thread
   raises the report, or ends the process. If it does neither in some seconds, it may be in code
   that never returns. This thread ends the process of `pipegrad train` and `launch` then. Another
   process is its user's: the error is raised in the thread that runs verbs, where it runs Python.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Event
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from pipegrad.comm import plain
from pipegrad.comm.activity import Activity, activities, give_back, verb_thread
from pipegrad.comm.agreement import store
from pipegrad.comm.failures import Failure, failure_of, has_lost_connection
from pipegrad.comm.process_groups import cut_all
from pipegrad.comm.watch.failure_report import STALLED, FailureReport, make_report
from pipegrad.comm.watch.launcher import tell_launcher
from pipegrad.comm.watch.processes import Processes
from pipegrad.comm.watch.rank_state import (
    LastProgress,
    RankState,
    drawing_of,
    late_agreement,
    state_of_this_rank,
)
from pipegrad.errors import MessageError, StallError

_POLL_SECONDS = 0.5
_TICK_SECONDS = 0.02
_ANSWER_SECONDS = 8.0  # for all ranks to post what they are at
_REPORT_SECONDS = 4.0  # then for the report
_LIMIT_SECONDS = _ANSWER_SECONDS + 2 * _REPORT_SECONDS
_LEAVE_SECONDS = 5.0  # for the main thread to come out of its wait
_END_SECONDS = 5.0  # for the process to end after that
_JOIN_SECONDS = 1.0
_SUSPENDED_SECONDS = 5.0  # between two looks: this process did not run meanwhile
_LINE_SECONDS = 10.0  # until a line says for whom an agreement waits; then doubled
_has_alarm = False  # whether any watch of this process has one
_last_verb = "its set-up"  # that has ended well
_watches: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


class Watch:
    """The watch of this rank under one default process group; see [Note: watch].

    Attributes:
        minds_ends: Whether a process of this machine that ends without `leave` raises the alarm.
        show: Takes the text of a report, on the rank that has made it; by default it prints it.
        end_seconds: How long the process may take to end after `leave`, if `minds_ends`.
    """

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.show: Callable[[str], object] = _print
        self.minds_ends = False
        self.end_seconds = 600.0
        self._world = ref(dist.group.WORLD)
        # A wait of another thread holds its connection to the store until it ends.
        own = store().clone()
        life = own.count(f"pipegrad/watch/lives/{self._rank}")
        self._store, self._prefix = own, f"pipegrad/watch/{life}"
        self._processes = Processes(own, self._prefix, self._rank)
        self._own: FailureReport | None = None
        self._own_lock = threading.Lock()
        self._line_seconds = _LINE_SECONDS
        self._failure: Failure | None = None
        self._progress = LastProgress()
        self._alarm: str | None = None
        self._alarm_since = 0.0
        self._has_reached_store = False  # after the alarm
        self._has_lost_store = False  # its keeper has ended, or the connection broke
        self._report: FailureReport | None = None
        self._has_report = Event()
        self._is_taken = False
        self._wake = Event()  # for the thread of the store
        self._stopped = Event()
        # Time in a debugger does not count; see [Note: debuggers].
        self._waits_for_debugger = False
        self._sign, self._sign_since = b"", 0.0  # of another rank's debugger, and since when
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"pipegrad {name}", daemon=True)
            for target, name in ((self._watch, "watch"), (self._talk, "watch store"))
        ]
        for thread in self._threads:
            thread.start()
        # Python would end these threads inside of torch, which aborts the process. Without a strong
        # reference: an old process group needs no watch.
        self._at_exit = partial(_stop, ref(self))
        atexit.register(self._at_exit)

    # What the main thread calls.

    def fail(self, error: BaseException, note: str = "", words: str = "") -> FailureReport:
        """Tells all ranks that this one has failed for good; returns the report of the job.

        It takes some seconds at most.

        Args:
            error: What was raised.
            note: Follows the error in the report, if it is the cause.
            words: Follow the cause, if it is another rank.
        """
        self._failure = replace(failure_of(error), note=note)
        self._raise_alarm(words)
        return self.report()

    def report(self) -> FailureReport:
        """Returns the report of an alarm, when it is there; the main thread goes on with it."""
        self._has_report.wait(_LIMIT_SECONDS + 2 * _POLL_SECONDS)
        with self._lock:
            self._is_taken = True
            _raise_in(threading.get_ident(), None)
        report = self._report or self._own_report("the other ranks have made no report")
        if self.minds_ends:
            _end_soon(report.exit_code)
        return report

    @property
    def has_alarm(self) -> bool:
        """Whether a rank has raised the alarm, as far as this rank knows."""
        return self._alarm is not None

    def look_beside(self) -> bool:
        """Looks at once whether a process of this machine has ended; returns `has_alarm`."""
        self._wake.set()
        deadline = time.monotonic() + 2 * _POLL_SECONDS
        while not self.has_alarm and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        return self.has_alarm

    def leave(self) -> None:
        """Ends the watch of this rank: its process may end from now on, and that is no failure."""
        if not self.has_alarm:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._processes.leave()
        self.stop()
        if self.minds_ends and self.end_seconds < threading.TIMEOUT_MAX:
            _call_after(self.end_seconds, _end_late)

    def end(self) -> None:
        """Says, to ranks that may still wait for this one, that it has ended without a failure."""
        if self.has_alarm:
            return
        thread = threading.Thread(target=self._end, daemon=True)  # the network may be cut
        thread.start()
        thread.join(_JOIN_SECONDS)

    def _end(self) -> None:
        with contextlib.suppress(Exception):
            self._processes.end(_last_verb)

    # The thread that never blocks.

    def _watch(self) -> None:
        try:
            self._look()
        except Exception:
            if self.has_alarm and not self._is_taken and self.minds_ends:
                os._exit(STALLED)
            raise
        finally:
            atexit.unregister(self._at_exit)

    def _look(self) -> None:
        """Looks until there is a report, or this rank leaves."""
        last = time.monotonic()
        # Another default process group needs another watch. It has one.
        while not self._stopped.wait(_POLL_SECONDS) and dist.group.WORLD is self._world():
            now = time.monotonic()
            is_debugged = self._waits_for_debugger or in_debugger()
            if is_debugged or now - last > _SUSPENDED_SECONDS:
                # This process was suspended, perhaps with the whole job: it gets its time back.
                give_back(now - last, before=last)
                self._alarm_since += now - last
            last = now
            if self._alarm is None:
                self._progress.look()
                if (late := self._late()) is not None:
                    self._raise_alarm(late)
            elif self._report is not None:
                self._leave_wait(self._report)
                return
            elif now - self._alarm_since > self._patience_seconds:
                self._take(self._own_report(self._no_store))
        if not self._stopped.is_set():
            self._stopped.set()
            self.end()

    @property
    def _patience_seconds(self) -> float:
        """How long a report may take. A store that does not even take an alarm is gone."""
        if self._has_lost_store:
            return 0.0
        return _LIMIT_SECONDS if self._has_reached_store else _REPORT_SECONDS

    def _late(self, share: float = 1.0) -> str | None:
        """Returns words about an activity that has taken longer than a share of what it may."""
        now = time.monotonic()
        for stack in activities().values():
            for activity in stack:
                limit = activity.within_seconds
                if limit is not None and now - activity.since > share * limit:
                    return f"{activity.what} took longer than {limit:g} s on rank {self._rank}"
        return None

    def _raise_alarm(self, words: str) -> None:
        self._note_alarm(words)
        self._wake.set()

    def _note_alarm(self, words: str) -> None:
        global _has_alarm  # noqa: PLW0603 - verbs read it, and must not look for their watch
        with self._lock:
            if self._alarm is None:
                self._alarm, self._alarm_since = words, time.monotonic()
            _has_alarm = True

    def _leave_wait(self, report: FailureReport) -> None:
        """Makes waits of the main thread fail, and then what it runs, if it does not come back.

        Only `pipegrad train` and `launch` end the process: another one is its user's.
        """
        if not self._is_taken:
            # NCCL may block in it. At exit its end is waited for, as that of all threads in torch.
            self._threads.append(threading.Thread(target=cut_all, daemon=True))
            self._threads[-1].start()
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not self._is_taken and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
        if self._is_taken or dist.group.WORLD is not self._world():
            return
        if self.minds_ends:
            os._exit(report.exit_code)
        with self._lock:
            if not self._is_taken:
                _raise_in(verb_thread(), _stalled(report.cause))

    # The thread that talks to the store.

    def _talk(self) -> None:
        try:
            while not self._stopped.is_set():
                self._wake.wait(self._processes.pause_seconds or _POLL_SECONDS)
                self._wake.clear()
                if self._alarm is None:
                    self._processes.learn()
                    self._ask_for_debugger()
                if self._alarm is None and self.minds_ends:
                    if self._processes.has_lost():
                        self._raise_alarm("")
                    else:
                        self._say_who_is_late()
                if self._alarm is not None or self._store.check([self._key("alarm")]):
                    self._exchange()
                    return
        except Exception as error:  # noqa: BLE001 - a report must come, whatever is wrong
            self._waits_for_debugger = False
            # Whoever keeps the store may have ended because the job is done.
            self._has_lost_store = isinstance(error, dist.DistNetworkError)
            if isinstance(error, MessageError):
                self._note_alarm("")
            if self._alarm is not None:
                is_store = isinstance(error, dist.DistError | RuntimeError)
                self._take(self._own_report(self._no_store if is_store else repr(error)))

    def _ask_for_debugger(self) -> None:
        """Tells other ranks that this one is in a debugger; late ones ask whether another is."""
        key, now = self._key("debugger"), time.monotonic()
        if in_debugger():
            self._store.set(key, f"{self._rank} {now}")
        elif self._late(share=0.5) is None or not self._store.check([key]):
            self._waits_for_debugger = False
        else:
            # Whoever has ended in his debugger tells nothing new.
            if (sign := self._store.get(key)) != self._sign:
                self._sign, self._sign_since = sign, now
            self._waits_for_debugger = now - self._sign_since < _SUSPENDED_SECONDS

    def _say_who_is_late(self) -> None:
        """Shows for which ranks an agreement waits, if it waits long; on one rank of them."""
        found = late_agreement()
        if found is None:
            self._line_seconds = _LINE_SECONDS
            return
        activity, seconds = found
        if seconds < self._line_seconds or activity.absent is None:
            return
        self._line_seconds *= 2  # ever more rarely
        absent = activity.absent(self._store)
        if absent and self._rank == min(set(activity.ranks) - set(absent)):
            _write(
                f"{activity.what}: ranks {absent} have not come yet, the others wait for "
                f"{seconds:.0f} s"
            )

    def _exchange(self) -> None:
        """Posts what this rank is at; makes the report, or takes it."""
        own = f"{self._rank} {self._alarm or ''}"
        first = self._store.set_first(self._key("alarm"), own).decode()
        self._has_reached_store = True
        number, _, words = first.partition(" ")
        self._note_alarm(words)
        state = state_of_this_rank(self._rank, self._failure, self._progress)
        self._store.set(self._key("state", self._rank), plain.dumps(state))
        if int(number) == self._rank:
            self._make_report(words)
        self._take_report(int(number))

    def _make_report(self, words: str) -> None:
        self._processes.learn()
        states = self._answers()
        signs = {r: self._processes.sign(r) for r in range(self._num_ranks) if r not in states}
        report = make_report(
            states,
            self._num_ranks,
            reporter=self._rank,
            alarm=words,
            signs=signs,
            draw=drawing_of(self._failure),
        )
        # This thread shows it: the main thread may never come back. A common error is not shown
        # here, since each rank raises it in its own words.
        if report.kind != "common":
            self._show(report.text)
        self._store.set(self._key("report"), plain.dumps((report.cause, report.kind)))

    def _answers(self) -> dict[int, RankState]:
        """Returns the states of the ranks that answer in time."""
        states = dict[int, RankState]()
        now = time.monotonic()
        deadline, known_by = now + _ANSWER_SECONDS, now + 3 * _POLL_SECONDS

        while len(states) < self._num_ranks and time.monotonic() < deadline:
            for rank in range(self._num_ranks):
                if rank not in states and self._store.check([key := self._key("state", rank)]):
                    states[rank] = plain.loads(self._store.get(key), RankState)
            silent = [rank for rank in range(self._num_ranks) if rank not in states]
            if time.monotonic() > known_by and all(map(self._processes.is_gone, silent)):
                break
            time.sleep(_TICK_SECONDS)
        return states

    def _take_report(self, reporter: int) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS + _REPORT_SECONDS
        while not self._store.check([self._key("report")]):
            if time.monotonic() > deadline:
                self._take(self._own_report(f"rank {reporter} has not made its report"))
                return
            time.sleep(_TICK_SECONDS)
        cause, kind = plain.loads(self._store.get(self._key("report")), tuple)
        self._take(FailureReport(cause, "", reporter, kind))

    def _take(self, report: FailureReport) -> None:
        with self._lock:
            self._report = self._report or report
        tell_launcher(report.cause, is_all=report.kind == "common")
        self._has_report.set()

    def _own_report(self, reason: str) -> FailureReport:
        """Returns a report of this rank alone. One rank of a machine shows it."""
        with self._own_lock:
            if self._own is None:
                self._own = self._make_own_report(reason)
        return self._own

    def _make_own_report(self, reason: str) -> FailureReport:
        signs = {rank: self._processes.sign(rank) for rank in self._processes.lost()}
        if self._has_lost_store and self._rank and not _is_of_torchrun():
            signs = {0: _KEEPER, **signs}
        why = ". ".join(part for part in (self._alarm, reason) if part)
        try:
            state = state_of_this_rank(self._rank, self._failure, self._progress)
        except Exception as error:  # noqa: BLE001 - there must be a report
            state, why = RankState(self._rank, "", os.getpid()), f"{why}. {error!r}"
        report = FailureReport.of_one_rank(state, why, signs)
        if self._processes.is_first():
            self._show(report.text)
        return report

    @property
    def _no_store(self) -> str:
        """Why this rank cannot reach the others."""
        if _is_of_torchrun():
            return _NO_STORE.format(keeper="torchrun")
        return "" if self._has_lost_store else _NO_STORE.format(keeper="rank 0")

    def _show(self, text: str) -> None:
        # A report must come to its end, also if nobody can read it.
        with contextlib.suppress(Exception):
            self.show(text)

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def stop(self) -> None:
        """Ends the threads."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)


_NO_STORE = (
    "the key-value store does not answer: the network is cut, or {keeper}, which keeps it, has "
    "ended or is stopped"
)
_KEEPER = "keeps the key-value store: it has ended, or the connection to it is lost"


# [Note: debuggers] Someone who looks at a rank in a debugger may take his time. The clocks of that
# rank stop while its thread of verbs is at the prompt of pdb, of what is built on it, or of pydevd,
# which VS Code and PyCharm use. It says so in the store, again and again. A rank that has used half
# of its time for a verb looks there, and its clocks stop, too. Timeouts of torch's process groups
# go on.
_PROMPTS = {"interaction": "/pdb.py", "do_wait_suspend": "pydevd"}  # functions, of which files


def in_debugger() -> bool:
    """Whether the thread that runs verbs is at the prompt of a debugger."""
    frame = sys._current_frames().get(verb_thread())
    while frame is not None:
        file = _PROMPTS.get(frame.f_code.co_name)
        if file is not None and file in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def watch() -> Watch | None:
    """Returns the watch of the default process group; None without one, and for one rank alone.

    Every rank of the group must call it. The first call begins to watch.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _watches:
        _watches[world] = Watch()
    return _watches[world]


class Bounded(Activity):
    """An activity that a watch ends if it takes too long. It is part of a verb, on the main thread.

    After an alarm of any rank, an error inside becomes a StallError with the cause. A lost
    connection is an alarm: nobody can go on without that rank.
    """

    __slots__ = ()

    def __exit__(self, *raised: object) -> None:
        global _last_verb  # noqa: PLW0603 - whoever waits for this rank is told what it did last
        super().__exit__(*raised)
        error, world = raised[1], dist.group.WORLD
        if error is None and self.within_seconds is not None:
            _last_verb = self.what
        lost = error if isinstance(error, Exception) and has_lost_connection(error) else None
        if not (_has_alarm or lost) or isinstance(error, StallError) or world is None:
            return
        own = _watches.get(world)
        if own is None or not (error is None or isinstance(error, Exception)):
            return
        # Also a verb that has ended well: after an alarm other ranks have ended.
        if own.has_alarm:
            raise StallError(own.report().cause) from error
        if lost is not None:
            # A symptom: another rank has ended, or its machine is gone. The watch knows more.
            words = f"Rank {dist.get_rank()} lost the connection in {self.what}"
            raise StallError(own.fail(lost, words=words).cause) from lost


def _raise_in(thread: int, error: type[StallError] | None) -> None:
    """Raises an error in a thread, where it runs Python; None withdraws one not raised yet."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in.argtypes = (ctypes.c_ulong, ctypes.c_void_p)
    raise_in(thread, None if error is None else id(error))


def _stalled(words: str) -> type[StallError]:
    """Returns a StallError that needs no arguments: Python raises a class in another thread."""

    class StalledError(StallError):
        def __init__(self) -> None:
            super().__init__(words)

        def __reduce__(self) -> tuple[type[StallError], tuple[str]]:
            return StallError, (words,)

    StalledError.__name__ = StalledError.__qualname__ = StallError.__name__
    StalledError.__module__ = StallError.__module__
    return StalledError


def _is_of_torchrun() -> bool:
    """Whether torchrun keeps the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _call_after(seconds: float, function: Callable[..., object], *arguments: object) -> None:
    """Calls a function later, in a thread that keeps no process from its end."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _end_soon(code: int) -> None:
    """Ends this process in some seconds, if its own end hangs."""
    # gloo may wait for a stopped rank when a group is destroyed, and that may hold Python's lock.
    # Then no thread of Python runs, and only a thread of C can end the process.
    _call_after(_END_SECONDS, os._exit, code)
    faulthandler.dump_traceback_later(2 * _END_SECONDS, exit=True)


def _end_late() -> None:
    """Ends a process whose run has ended, and which does not."""
    names = [t.name for t in threading.enumerate() if not t.daemon and t.name != "MainThread"]
    _write(f"Error: the run has ended, but not its process; threads that still run: {names}")
    os._exit(STALLED)


def _stop(watched: ref[Watch]) -> None:
    own = watched()
    if own is not None:
        own.end()
        own.stop()


def _print(text: str) -> None:
    _write(f"Error: {text}")


def _write(line: str) -> None:
    with contextlib.suppress(Exception):  # nobody may be there to read it
        print(line, file=sys.stderr, flush=True)  # noqa: T201
