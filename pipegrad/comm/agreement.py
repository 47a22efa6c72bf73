"""Agreement between ranks: all or nobody, with the same words, within a time of its own.

Runs over the key-value store that the default process group was made with, not over a collective:
a rank that stays away can then be named, and nothing depends on the backend or on its timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pipegrad.errors import AgreementError, ends_in_words

T = TypeVar("T")
AGREE_SECONDS = 60.0  # how long ranks wait for the slowest one, unless told otherwise
_SLOW_SECONDS = 600.0  # where ranks may be minutes apart
_COMPLETE = "complete"
# The meetings of each set of ranks, by default process group.
_meetings: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Meetings]] = (
    WeakKeyDictionary()
)
STORE_IS_GONE = (
    "the key-value store of the process group cannot be reached: the process that keeps it has "
    "ended (rank 0, unless torchrun keeps it); look at its output"
)


@dataclass(frozen=True)
class _Failure:
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class _Meetings:
    """The meetings of a set of ranks under one default process group.

    Attributes:
        life: The number of that process group on its store, which may have had others before.
        number: How many meetings there were; with `life` it names the keys of the next one.
        left: The keys that this rank left in the last meeting.
    """

    life: int
    number: int = 0
    left: list[str] = field(default_factory=list)


def agree(
    what: str,
    function: Callable[[], T],
    *,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = AGREE_SECONDS,
) -> list[T]:
    """Runs `function` on every rank and returns the result of all of them, or fails on all alike.

    Whatever can fail on one rank alone (files, imports, devices, configuration) belongs in
    `function`: its error becomes everybody's. Must be called by every one of `ranks` in the same
    order. Results travel pickled; equal ones are stored once.

    Args:
        what: What is being agreed on, the same on all ranks; for messages.
        function: Takes nothing; its result must pickle.
        ranks: Global ranks that take part, all by default.
        timeout_seconds: How long to wait for the slowest rank.

    Returns:
        The results, by ascending rank.

    Raises:
        AgreementError: On every rank alike, if a rank failed or did not arrive. Where every rank
            failed with the same error, that error itself is raised.
    """
    if not dist.is_initialized():
        return [_alone(what, function)]
    members = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
    error: BaseException | None = None
    mine: T | _Failure
    try:
        mine = function()
        payload = pickle.dumps(mine)
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it becomes every rank's error
        error, mine = caught, _Failure(type(caught).__name__, str(caught))
        payload = pickle.dumps(mine)
    try:
        place = f"pipegrad/agree/{_next_meeting(members)}"
        if error is not None and not ends_in_words(error):
            _leave(what, payload, place)
            raise error
        replies = _exchange(what, payload, members, timeout_seconds, place)
    except dist.DistNetworkError as gone:
        raise AgreementError(f"{what}: {STORE_IS_GONE}") from gone
    left = [str(dist.get_rank()), _digest(payload), "verdict"]
    _forget_last(members, [f"{place}/{key}" for key in left])
    results: list[T | _Failure] = [pickle.loads(reply) for reply in replies]
    failures = {r: x for r, x in zip(members, results, strict=True) if isinstance(x, _Failure)}
    if not failures:
        return [x for x in results if not isinstance(x, _Failure)]
    alike = len(failures) == len(members) and len(set(failures.values())) == 1
    if alike and isinstance(error, Exception):
        raise error
    told = "\n".join(f"  rank {rank}: {failure}" for rank, failure in failures.items())
    raise AgreementError(
        f"{what}: {len(failures)} of {len(members)} ranks failed, so all stop:\n{told}"
    ) from error


def same(what: str, said: Mapping[int, str]) -> None:
    """Does nothing if all ranks say the same.

    Raises:
        AgreementError: If they do not; lists who says what.
    """
    by_value: dict[str, list[int]] = {}
    for rank, value in said.items():
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        views = "\n".join(f"  ranks {ranks}: {value}" for value, ranks in by_value.items())
        raise AgreementError(f"ranks disagree on {what}; make them the same:\n{views}")


def _alone(what: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except SystemExit as error:  # nothing would be said, and the exit code might be 0
        raise AgreementError(f"{what} failed: {_Failure('SystemExit', str(error))}") from error


def _leave(what: str, payload: bytes, place: str) -> None:
    """Leaves what this rank has to say for all others."""
    digest = _digest(payload)
    store().set(f"{place}/{digest}", payload)  # type: ignore[arg-type]
    store().set(f"{place}/{dist.get_rank()}", f"{digest} {what}")


def _exchange(
    what: str, payload: bytes, ranks: tuple[int, ...], timeout_seconds: float, place: str
) -> list[bytes]:
    kv = store()
    _leave(what, payload, place)
    keys = {rank: f"{place}/{rank}" for rank in ranks}
    verdict, cause = _COMPLETE, None
    try:
        kv.wait(list(keys.values()), timedelta(seconds=timeout_seconds))
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:  # a FileStore says so of its time
        missing = [rank for rank, key in keys.items() if not kv.check([key])]
        if not missing:
            raise
        verdict, cause = (
            (
                f"{what}: nothing heard from ranks {missing} within {timeout_seconds:g} s; "
                f"look at their output, they failed or are stuck before this point"
            ),
            error,
        )
    # The first verdict stands: a rank that comes late fails like those that gave up on it.
    verdict = kv.compare_set(f"{place}/verdict", "", verdict).decode()
    if verdict != _COMPLETE:
        raise AgreementError(verdict) from cause
    words = {rank: kv.get(key).decode().split(" ", 1) for rank, key in keys.items()}
    if len({said for _, said in words.values()}) > 1:
        places = {rank: said for rank, (_, said) in words.items()}
        raise AgreementError(f"ranks are in different places of the program: {places}")
    digests = [digest for digest, _ in words.values()]
    known = {d: kv.get(f"{place}/{d}") for d in sorted(set(digests))}
    return [known[d] for d in digests]


def _next_meeting(ranks: tuple[int, ...]) -> str:
    members = _digest(repr(ranks).encode())
    known = _known()
    if ranks not in known:  # a store may outlive process groups, and still have their answers
        life = store().add(f"pipegrad/lives/{members}/{dist.get_rank()}", 1)
        known[ranks] = _Meetings(life)
    meetings = known[ranks]
    meetings.number += 1
    return f"{members}/{meetings.life}/{meetings.number}"


def _known() -> dict[tuple[int, ...], _Meetings]:
    world = dist.group.WORLD
    assert world is not None
    return _meetings.setdefault(world, {})


def _forget_last(members: tuple[int, ...], keys: list[str]) -> None:
    """Deletes what this rank left in the meeting before: who has come to this one has read it."""
    meetings = _known()[members]
    last, meetings.left = meetings.left, keys
    with contextlib.suppress(RuntimeError):  # a store that deletes nothing
        for key in last:
            store().delete_key(key)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def once_a_machine(function: Callable[[], None], *, timeout_seconds: float = 10.0) -> None:
    """Runs `function` on each machine's first rank; on others only if that one does not come.

    For words that all ranks have to say: torchrun ends all ranks as soon as one has ended.
    """
    if not dist.is_initialized():
        function()
        return
    key = f"pipegrad/told/{os.environ.get('GROUP_RANK', '0')}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        function()
        store().set(key, "")
        return
    try:
        store().wait([key], timedelta(seconds=timeout_seconds))
    except dist.DistError:  # that rank is stuck or gone
        function()


def collective_timeout(device: torch.device) -> timedelta | None:
    """Returns the timeout of the default process group; None if its backend has none."""
    world = dist.group.WORLD
    try:
        return world._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None


def slow_seconds(device: torch.device, agree_seconds: float) -> float:
    """Returns how long ranks wait for each other where they load files, or compile kernels.

    The timeout of the process group up to ten minutes, or `agree_seconds` if that is longer.
    """
    timeout = collective_timeout(device)
    wanted = _SLOW_SECONDS if timeout is None else timeout.total_seconds()
    return max(agree_seconds, min(wanted, _SLOW_SECONDS))


def keep_timeout(group: dist.ProcessGroup, device: torch.device) -> None:
    """Gives a group that torch has made the timeout of the default process group."""
    timeout = collective_timeout(device)
    if timeout is not None:
        group._get_backend(device)._set_default_timeout(timeout)


class Board:
    """Words that one rank leaves for others, who wait until they are there.

    Args:
        name: The same on all ranks, and of no other board.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def post(self, key: str, words: bytes) -> None:
        """Leaves `words`; returns at once."""
        store().set(f"pipegrad/board/{self._name}/{key}", words)  # type: ignore[arg-type]

    def wait(self, key: str, timeout: timedelta) -> bytes:
        """Returns what was left.

        Raises:
            AgreementError: If nothing was, in time.
        """
        full = f"pipegrad/board/{self._name}/{key}"
        try:
            store().wait([full], timeout)
        except dist.DistStoreError as error:
            raise AgreementError(
                f"nothing heard within {timeout.total_seconds():g} s of {key!r}: one of the other "
                f"ranks failed or is stuck, look at their output"
            ) from error
        return bytes(store().get(full))


def store() -> Store:
    """Returns the key-value store of the default process group."""
    world = dist.group.WORLD
    assert world is not None
    found: Store = world.get_group_store()
    return found
