"""One machine: where a launcher and its ranks meet if nobody else takes part.

torch's own rendezvous listens on all interfaces, also for one machine, and unpickles what it finds
in its store.
"""

from __future__ import annotations

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from pipegrad.comm.store import LOOPBACK, loopback_store

ONE_MACHINE = "pipegrad"  # as a name of torch's registry


class OneMachine(RendezvousHandler):
    """The rendezvous of one launcher: it is alone, so it waits for nobody.

    Args:
        run_id: Of the launch.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id, self._store, self._round = run_id, loopback_store(), 0
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the launcher's store."""
        return True

    def get_backend(self) -> str:
        """Returns the name of this kind."""
        return ONE_MACHINE

    def get_run_id(self) -> str:
        """Returns the name of the launch."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the launcher's part of the store, and where ranks find theirs."""
        self._round += 1  # ranks that start again find no keys of those before
        store = PrefixStore(f"{ONE_MACHINE}/launcher/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """Returns whether the launch is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """Ends the launch."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Returns how many machines wait to take part: none."""
        return 0

    def shutdown(self) -> bool:
        """Ends the launch."""
        self._is_closed = True
        return True


def register() -> None:
    """Makes the rendezvous known to torch's launcher."""
    rendezvous_handler_registry.register(ONE_MACHINE, _made)


def _made(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneMachine(parameters.run_id)
