"""Which parameters a declared tie means."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.errors import PlanError
from pipegrad.model.manifest import ParameterEntry, RankManifest
from pipegrad.model.suspects import Location, is_zero
from pipegrad.model.ties import Tie, different_starts


class Claims:
    """Which places each declared tie means, and whether these may be one parameter.

    Args:
        stages: The agreed parameters of each stage.
        manifests: Of all ranks, ascending.
        ties: The declarations.

    Attributes:
        places: For each tie the places that it means, by their first names.

    Raises:
        PlanError: If a tie names what no stage holds.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ParameterEntry]],
        manifests: Sequence[RankManifest],
        ties: Sequence[Tie],
    ) -> None:
        self._homes: dict[Location, Location] = {}  # every place, aliases too -> its first name
        self._by_name: dict[str, list[Location]] = {}
        for stage, entries in enumerate(stages):
            for entry in entries:
                for name in (entry.name, *entry.aliases):
                    self._homes[stage, name] = (stage, entry.name)
                    self._by_name.setdefault(name, []).append((stage, name))
        held: dict[int, set[Location]] = {}
        for manifest in manifests:
            for index, location in manifest.held:
                held.setdefault(index, set()).add(location)
        self._all_traced = {s for m in manifests for s in m.traced} == set(range(len(stages)))
        self._starts: dict[Location, tuple[str | None, str | None]] = {}
        for manifest in manifests:
            for location, digest in manifest.fingerprints:
                self._starts.setdefault(location, (digest, None))
            for location, bits in manifest.constants:
                self._starts.setdefault(location, (None, bits))
        self._tie_of: dict[Location, Tie] = {}
        self._known: set[Location] = set()  # to be the parameter, not by its name alone
        self.locations: list[set[Location]] = []
        for index, tie in enumerate(ties):
            self.locations.append(self._claimed(tie, held.get(index, set())))

    def _claimed(self, tie: Tie, held: set[Location]) -> set[Location]:
        claimed = {*held, *(location for location in tie.locations if location in self._homes)}
        claimed.update(location for name in tie.names for location in self._by_name.get(name, ()))
        missing = [p for p in tie.locations if p not in self._homes]
        missing_names = [n for n in tie.names if n not in self._by_name]
        is_found = self._all_traced or len(claimed) >= len(tie.names)
        if missing or (missing_names and not (claimed and is_found)):
            what = missing_names or [f"{name!r} on stage {stage}" for stage, name in missing]
            raise PlanError(
                f"tie {tie}: no such parameter: {what}. Names are those of the stages' modules; "
                f"where they differ from the uncut model's, declare the tie as {{stage: name}}, or "
                f"give Pipe.replicated_params if torch's tracer has cut the model"
            )
        known = claimed if tie.traced else held
        homes = {self._homes[location] for location in claimed}
        self._known.update(self._homes[location] for location in known)
        self._tie_of.update(dict.fromkeys(homes, tie))
        self._refuse_ambiguous(tie)
        return homes

    def _refuse_ambiguous(self, tie: Tie) -> None:
        """Refuses a name that several stages have, if no bits tell which of them is meant."""
        for name in tie.names if len(tie.names) > 1 and not self._all_traced else ():
            homes = sorted({self._homes[location] for location in self._by_name.get(name, ())})
            unclear = [
                home
                for home in homes
                if home not in self._known and self._starts.get(home, ("", None))[1] is not None
            ]
            if len({stage for stage, _ in homes}) > 1 and unclear:
                raise PlanError(
                    f"tie {tie}: stages {[stage for stage, _ in homes]} all have a parameter "
                    f"{name!r}, and it starts constant, so nothing tells which of them is meant. "
                    f"Declare the tie as {{stage: name, ...}}"
                )

    def refuse_different_starts(self, group: Sequence[Location]) -> None:
        """Refuses places of one tie that start with different bits, which one would overwrite.

        A seed for each rank explains the difference where these places are known to be the uncut
        model's parameter. Zeros are nothing to lose.

        Raises:
            PlanError: Names two of them.
        """
        first, *others = group
        for location in others:
            one, other = self._starts.get(first), self._starts.get(location)
            are_known = first in self._known and location in self._known
            if one is None or other is None or one == other or are_known or is_zero(other[1]):
                continue
            tie = self._tie_of.get(location) or self._tie_of.get(first) or "of one rank"
            raise PlanError(different_starts(tie, first, location))
