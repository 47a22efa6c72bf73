"""Agreement between ranks: all ranks succeed, or all raise the same error.

It uses the key-value store of the default process group instead of a collective, because then the
error can name a rank that stays away, and nothing depends on the backend or on its timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pipegrad.comm import plain
from pipegrad.comm.activity import Activity
from pipegrad.comm.store import store
from pipegrad.errors import (
    AgreementError,
    MessageError,
    StallError,
    ends_in_words,
    following,
    level_of_caller,
    named,
)
from pipegrad.printable import shortened

T = TypeVar("T")
Local = TypeVar("Local")
AGREE_SECONDS = 60.0  # default wait for the slowest rank
_SLOW_SECONDS = 600.0  # where ranks may be minutes apart
_LOOK_SECONDS = 0.02
_SHORT, _CONTEXT = 72, 16  # characters of a line, and before a difference
_MOST_VALUES, _MOST_RANKS = 4, 8  # in a message
# The agreements of each set of ranks, by default process group.
_agreements: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Agreements]] = (
    WeakKeyDictionary()
)
STORE_IS_GONE = (
    "the key-value store of the process group cannot be reached: the process that keeps it has "
    "ended (rank 0, unless torchrun keeps it); look at its output"
)


@dataclass(frozen=True)
class _Failure:
    words: str


@dataclass
class _Agreements:
    """The agreements of a set of ranks under one default process group.

    Attributes:
        prefix: Begins the keys of an agreement, equal on all of these ranks, and never used before.
        number: Count of agreements without a name. It makes the keys of an agreement unique.
        keys: The keys that this rank has set in the last agreement.
    """

    prefix: str
    number: int = 0
    keys: list[str] = field(default_factory=list)


def agree(
    what: str,
    function: Callable[[], T],
    *,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = AGREE_SECONDS,
    name: str | None = None,
) -> list[T]:
    """Runs `function` on every rank and returns all results, or raises the same error on all ranks.

    `agree_keeping` is for a function that also makes an object that this rank keeps.

    Put everything into `function` that can fail on one rank alone: files, imports, devices,
    configuration. Then its error is raised on all ranks. All of `ranks` must call `agree` in the
    same order, or name the agreement. Equal results are stored once.

    Args:
        what: The subject, the same on all ranks; for messages.
        function: A function without arguments whose result is plain data: see [Note: plain data].
        ranks: Global ranks that take part; all by default.
        timeout_seconds: Longest wait for the slowest rank.
        name: A name that the same ranks use once, where a rank may stay away and go on. Without
            a name each rank counts its agreements, and all must have counted alike.

    Returns:
        The results, by ascending rank.

    Raises:
        AgreementError: On all ranks, if a rank failed or did not arrive.
        StallError: At once, if it is the error of `function`; likewise an error that all ranks
            raise.
        MessageError: If another program has written a value that this rank reads.
        Exception: The error of `function`, if it is the same on all ranks.
    """
    _, results = agree_keeping(
        what,
        lambda: (None, function()),
        ranks=ranks,
        timeout_seconds=timeout_seconds,
        name=name,
    )
    return results


def agree_keeping(
    what: str,
    function: Callable[[], tuple[Local, T]],
    *,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = AGREE_SECONDS,
    name: str | None = None,
) -> tuple[Local, list[T]]:
    """Runs `function` as `agree` does; returns its local result, and the replies of all ranks.

    Args:
        what: See `agree`.
        function: A function without arguments that returns two objects. The first stays on this
            rank, and may be of any type. The second is this rank's reply: plain data.
        ranks: See `agree`.
        timeout_seconds: See `agree`.
        name: See `agree`.

    Raises:
        PipegradError: As `agree` does.
    """
    if not dist.is_initialized():
        local, reply = _alone(what, function)
        return local, [reply]
    members = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
    error: BaseException | None = None
    began: float | None = None
    outcome: tuple[Local, T] | _Failure
    try:
        outcome = function()
        # Inside `try`, because a result that cannot be sent is an error of this rank, which all
        # ranks raise.
        payload = plain.dumps(outcome[1])
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it becomes every rank's error
        began, error, outcome = time.time(), caught, _Failure(named(caught))
        payload = plain.dumps(outcome)
    try:
        agreements = _agreements_of(members)
        # No message is needed for the number, because all ranks call `agree` in the same order and
        # count alike. An agreement with a name is not counted, because a rank that stays away from
        # it would look for all later agreements at wrong keys.
        if name is None:
            agreements.number += 1
        prefix = f"{agreements.prefix}/{name or agreements.number}"
        # An interrupt or an exit must end this process now. Post its message first, because the
        # other ranks would wait until the timeout.
        if error is not None and not ends_in_words(error):
            _post(what, payload, members, prefix)
            raise error
        if error is not None and nobody_comes(error):
            raise error
        replies = _exchange(what, payload, members, timeout_seconds, prefix)
        results: list[T | _Failure] = [plain.loads(reply) for reply in replies]
    except dist.DistNetworkError as gone:
        raise following(AgreementError(f"{what}: {STORE_IS_GONE}")) from gone
    names = [str(dist.get_rank()), _digest(payload), "come", "all"]
    _delete_last(agreements, [f"{prefix}/{name}" for name in names])
    failures = {r: x for r, x in zip(members, results, strict=True) if isinstance(x, _Failure)}
    if failures or isinstance(outcome, _Failure):
        _raise_failures(what, failures, len(members), error, began)
    return outcome[0], [x for x in results if not isinstance(x, _Failure)]


def nobody_comes(error: BaseException) -> bool:
    """True if no other rank comes, because the job has ended or all ranks raise the error."""
    return isinstance(error, StallError) or getattr(error, "is_everyones", False)


def _raise_failures(
    subject: str,
    failures: Mapping[int, _Failure],
    num_ranks: int,
    error: BaseException | None,
    began: float | None,
) -> NoReturn:
    """Raises the error of this rank if all ranks have the same; otherwise lists all errors."""
    is_common = len(failures) == num_ranks and len(set(failures.values())) == 1
    if is_common and isinstance(error, Exception):
        raise error
    # Put a cause into the first line, because a launcher shows no other one.
    first, *others = (f"rank {rank}: {failure.words}" for rank, failure in failures.items())
    line, *more = first.split("\n")
    line += f" ({subject}: {len(failures)} of {num_ranks} ranks failed, so all stop)"
    failed = AgreementError("\n".join([line, *more, *(f"  {other}" for other in others)]))
    # All ranks raise this at once. A report names the one that failed first.
    failed.began = began
    raise failed from error


def same(what: str, values: Mapping[int, str]) -> None:
    """Checks that all ranks have the same value.

    Args:
        what: The subject, for the message.
        values: Rank -> value.

    Raises:
        AgreementError: If values differ. It shows the difference, and the ranks of each value.
    """
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        views = zip(_differing(list(by_value)), map(of_ranks, by_value.values()), strict=True)
        shown = ", ".join(f"{value} on {ranks}" for value, ranks in [*views][:_MOST_VALUES])
        if len(by_value) > _MOST_VALUES:
            shown += f", and {len(by_value) - _MOST_VALUES} more values"
        raise AgreementError(f"ranks disagree on {what}: {shown}; make them the same")


def of_ranks(ranks: Sequence[int]) -> str:
    """Returns the names of ranks, of many the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"ranks {list(ranks[:_MOST_RANKS])}{more}"


def _differing(values: Sequence[str]) -> list[str]:
    """Returns the first line in which texts differ; of long lines, the words that differ."""
    rows = itertools.zip_longest(*(value.split("\n") for value in values), fillvalue="nothing")
    lines = next(row for row in rows if len(set(row)) > 1)
    lines = tuple(line or "nothing" for line in lines)
    if max(map(len, lines)) <= _SHORT:
        return list(lines)
    # Keep the words before a difference, because they name the value.
    context = max(0, _num_alike(lines) - _CONTEXT)
    begin = lines[0].rfind(" ", max(0, context - _SHORT), context) + 1 or context
    rests = [line[begin:] for line in lines]
    # The end that they have alike begins with a space.
    alike = rests[0][len(rests[0]) - _num_alike([rest[::-1] for rest in rests]) :]
    end = len(alike) - alike.find(" ") if " " in alike else 0
    dots = "... " if begin else "", " ..." if end else ""
    return [f"{dots[0]}{shortened(rest[: len(rest) - end], 3 * _SHORT)}{dots[1]}" for rest in rests]


def _num_alike(texts: Sequence[str]) -> int:
    """Returns the length of the common prefix of texts."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))


def _alone(what: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except SystemExit as error:  # its own exit prints nothing, and its code may be 0
        raise AgreementError(f"{what} failed: {named(error)}") from error


def _post(subject: str, payload: bytes, ranks: tuple[int, ...], prefix: str) -> None:
    """Puts this rank's payload into the store; the last rank puts all payloads into one value."""
    digest, kv = _digest(payload), store()
    # Equal payloads have one key: a large result that all ranks share is stored once.
    kv.set(f"{prefix}/{digest}", payload)
    kv.set(f"{prefix}/{dist.get_rank()}", f"{digest} {subject}")
    # One rank reads for all: a few messages for each rank, and not one for each pair of ranks.
    if kv.count(f"{prefix}/come") == len(ranks):
        found: tuple[Sequence[object], object]
        try:
            rows = [kv.text(f"{prefix}/{rank}").split(" ", 1) for rank in ranks]
            found = rows, {each: kv.get(f"{prefix}/{each}") for each, _ in rows}
        except MessageError as error:
            found = (), str(error)
        kv.set_first(f"{prefix}/all", plain.dumps(found))


def _exchange(
    subject: str, payload: bytes, ranks: tuple[int, ...], timeout_seconds: float, prefix: str
) -> list[bytes]:
    kv, key = store(), f"{prefix}/all"
    _post(subject, payload, ranks, prefix)
    cause: RuntimeError | None = None
    try:
        with Activity(subject, ranks):
            kv.wait([key], timedelta(seconds=timeout_seconds))
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:
        missing = [rank for rank in ranks if not kv.check([f"{prefix}/{rank}"])]
        if not missing:
            raise
        words = (
            f"{subject}: nothing heard from ranks {missing} within {timeout_seconds:g} s; "
            f"all ranks must call it. Look at their output: they may have failed, or be stuck "
            f"before this point"
        )
        # Set the first value only: it counts for all ranks, because they may reach their timeouts
        # at different times. A late rank fails too, instead of going on alone.
        kv.set_first(key, plain.dumps((missing, words)))
        cause = error
    rows, payloads = plain.loads(kv.get(key), tuple)
    if isinstance(payloads, str):
        if not rows:
            raise MessageError(payloads)
        late = following(AgreementError(payloads))
        late.absent = tuple(rows)
        raise late from cause
    if len({text for _, text in rows}) > 1:
        subjects = {rank: text for rank, (_, text) in zip(ranks, rows, strict=True)}
        raise AgreementError(f"ranks are at different points of the program: {subjects}")
    return [payloads[each] for each, _ in rows]


def _agreements_of(ranks: tuple[int, ...]) -> _Agreements:
    """Returns the agreements of `ranks` under the present default process group."""
    world = dist.group.WORLD
    assert world is not None
    by_ranks = _agreements.setdefault(world, {})
    # The keys contain a number for each new process group, because a store may outlive a default
    # process group, and may still hold the replies of its agreements.
    if ranks not in by_ranks:
        members = _digest(repr(ranks).encode())
        life = store().count(f"pipegrad/lives/{members}/{dist.get_rank()}")
        by_ranks[ranks] = _Agreements(f"pipegrad/agree/{members}/{life}")
    return by_ranks[ranks]


def _delete_last(agreements: _Agreements, keys: list[str]) -> None:
    """Deletes the keys that this rank set in the previous agreement."""
    # The keys of this agreement stay, because other ranks may still read them. All ranks have
    # read the keys of the previous one, because all have arrived in this one.
    last, agreements.keys = agreements.keys, keys
    kv = store()
    with contextlib.suppress(RuntimeError):  # some stores cannot delete
        for key in last:
            kv.delete_key(key)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def once_a_machine(function: Callable[[], None], *, timeout_seconds: float = 10.0) -> None:
    """Runs `function` on the first rank of each machine; on others only if that rank is too late.

    Use it for a message that every rank could print. The other ranks wait for the first rank,
    because torchrun ends all ranks as soon as one rank has ended.
    """
    if not dist.is_initialized():
        function()
        return
    key = f"pipegrad/printed/{os.environ.get('GROUP_RANK', '0')}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        function()
        store().set(key, "")
        return
    kv, deadline = store(), time.monotonic() + timeout_seconds
    with contextlib.suppress(dist.DistError, StallError):  # the first rank has ended
        while time.monotonic() < deadline:
            if kv.check([key]):  # and no `wait`, which an alarm ends: the message may be about it
                return
            time.sleep(_LOOK_SECONDS)
    function()


def warn_once(words: str, key: str) -> None:
    """Warns, unless a rank of this job has warned with this key. It waits for no rank."""
    # If the store is gone, the job is at its end.
    with contextlib.suppress(dist.DistNetworkError):
        if dist.is_initialized() and store().count(f"pipegrad/warned/{key}") > 1:
            return
    warnings.warn(words, stacklevel=level_of_caller())


def collective_timeout(device: torch.device) -> timedelta | None:
    """Returns the timeout of the default process group; None if its backend has none."""
    world = dist.group.WORLD
    try:
        return world._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def slow_seconds(device: torch.device, agree_seconds: float) -> float:
    """Returns the seconds that ranks wait for each other while they load files or compile kernels.

    This is the timeout of the process group, but at most ten minutes; or `agree_seconds` if that
    is longer.
    """
    timeout = collective_timeout(device)
    seconds = _SLOW_SECONDS if timeout is None else timeout.total_seconds()
    return max(agree_seconds, min(seconds, _SLOW_SECONDS))


def keep_timeout(group: dist.ProcessGroup, device: torch.device) -> None:
    """Sets the timeout of the default process group in a group that torch has made."""
    timeout = collective_timeout(device)
    if timeout is not None:
        group._get_backend(device)._set_default_timeout(timeout)
