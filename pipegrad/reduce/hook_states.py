"""The states of handlers, such as error feedback: saved, and loaded on all ranks or on none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipegrad.comm.agreement import agree, same
from pipegrad.errors import AgreementError, PlanError, in_words
from pipegrad.plugins.handler import GradientHandler
from pipegrad.plugins.registry import ResolvedPlugin


def hook_states(
    handlers: Mapping[str, ResolvedPlugin[GradientHandler]], digest: str
) -> dict[str, Any]:
    """Returns the states of all handlers that have one; empty if none has.

    Args:
        handlers: All handlers, by name.
        digest: Of the plan.
    """
    states = {
        name: state
        for name, resolved in handlers.items()
        if (state := resolved.plugin.state_dict())
    }
    return {"plan": digest, "handlers": states} if states else {}


def load_hook_states(
    state: Mapping[str, Any],
    handlers: Mapping[str, ResolvedPlugin[GradientHandler]],
    digest: str,
    *,
    launching: Collection[str],
    ranks: Sequence[int],
) -> None:
    """Loads the states of handlers; see `GradientSync.load_state_dict`.

    Args:
        state: The saved state of this rank.
        handlers: All handlers, by name.
        digest: Of the plan.
        launching: Handlers that launch collectives on this rank. Others have no state here.
        ranks: All ranks that call this, ascending.
    """
    hook_state = dict(state.get("handlers", {}))

    def load() -> dict[str, str]:
        if state and state.get("plan") != digest:
            raise PlanError(
                "what handlers kept is of another plan: of another model, other handlers, buckets "
                "or ranks; error feedback fits into its own plan alone"
            )
        if unknown := sorted(hook_state.keys() - handlers.keys()):
            raise PlanError(f"what is to be loaded was kept by handlers {unknown}, not in use here")
        for name, resolved in handlers.items():
            try:
                resolved.plugin.load_state_dict(hook_state.get(name, {}))
            except Exception as error:
                raise PlanError(f"handler {name!r} cannot go on: {in_words(error)}") from error
        return {name: "what it kept" if hook_state.get(name) else "nothing" for name in launching}

    try:
        replies = dict(zip(ranks, agree("load_state_dict", load, ranks=ranks), strict=True))
        for name in handlers:
            sources = {rank: reply[name] for rank, reply in replies.items() if name in reply}
            same(f"what handler {name!r} goes on from", sources)
    except (PlanError, AgreementError) as error:
        # Ranks with and without a loaded state would compute different means. So all start anew.
        for resolved in handlers.values():
            resolved.plugin.load_state_dict({})
        if isinstance(error, PlanError):
            raise
        raise PlanError(str(error)) from error
