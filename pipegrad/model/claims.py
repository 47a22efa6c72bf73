"""Claims: the parameters that each declared tie means."""

from __future__ import annotations

from collections.abc import Sequence

from pipegrad.errors import PlanError
from pipegrad.model.manifest import ParameterEntry, RankManifest
from pipegrad.model.suspects import Location, is_zero
from pipegrad.model.ties import Tie, different_starts


class Claims:
    """The locations of each declared tie, and the check that they may be one parameter.

    Args:
        stages: The agreed parameters of each stage.
        manifests: Of all ranks, ascending.
        ties: The declarations.

    Attributes:
        locations: For each tie, the locations of its parameter, with the first name in each stage.

    Raises:
        PlanError: If a tie names a parameter that no stage holds.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ParameterEntry]],
        manifests: Sequence[RankManifest],
        ties: Sequence[Tie],
    ) -> None:
        self._homes: dict[Location, Location] = {}  # location under any name -> under its first
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
        # The lowest rank that holds a location decides how it starts: replicas are made equal to
        # it before the first step.
        # The lowest rank that holds a location decides how it starts: replicas are made equal to
        # it before the first step.
        self._starts: dict[Location, tuple[str | None, str | None]] = {}
        for manifest in manifests:
            for location, digest in manifest.fingerprints:
                self._starts.setdefault(location, (digest, None))
            for location, bits in manifest.constants:
                self._starts.setdefault(location, (None, bits))
        self._tie_of: dict[Location, Tie] = {}
        # Locations that surely hold their tie's parameter: by identity or bits, not only by name.
        self._certain: set[Location] = set()
        self.locations: list[set[Location]] = []
        for index, tie in enumerate(ties):
            self.locations.append(self._claimed(tie, held.get(index, set())))

    def _claimed(self, tie: Tie, held: set[Location]) -> set[Location]:
        claimed = {*held, *(location for location in tie.locations if location in self._homes)}
        claimed.update(location for name in tie.names for location in self._by_name.get(name, ()))
        missing = [p for p in tie.locations if p not in self._homes]
        missing_names = [n for n in tie.names if n not in self._by_name]
        # A cut may rename parameters, and a tracer may drop aliases. So a name of the uncut model
        # that no stage has is an error only if the tie has fewer locations than names.
        is_complete = self._all_traced or len(claimed) >= len(tie.names)
        if missing or (missing_names and not (claimed and is_complete)):
            absent = missing_names or [f"{name!r} on stage {stage}" for stage, name in missing]
            raise PlanError(
                f"tie {tie}: no such parameter: {absent}. Names are those of the stages' modules; "
                f"where they differ from the uncut model's, declare the tie as {{stage: name}}, or "
                f"give Pipe.replicated_params if torch's tracer has cut the model"
            )
        certain = claimed if tie.traced else held
        homes = {self._homes[location] for location in claimed}
        self._certain.update(self._homes[location] for location in certain)
        self._tie_of.update(dict.fromkeys(homes, tie))
        self._refuse_ambiguous(tie)
        return homes

    def _refuse_ambiguous(self, tie: Tie) -> None:
        """Refuses a name that several stages have, if their initial values do not differ."""
        for name in tie.names if len(tie.names) > 1 and not self._all_traced else ():
            homes = sorted({self._homes[location] for location in self._by_name.get(name, ())})
            unclear = [
                home
                for home in homes
                if home not in self._certain and self._starts.get(home, ("", None))[1] is not None
            ]
            if len({stage for stage, _ in homes}) > 1 and unclear:
                raise PlanError(
                    f"tie {tie}: stages {[stage for stage, _ in homes]} all have a parameter "
                    f"{name!r}, and it starts constant, so nothing tells which of them is meant. "
                    f"Declare the tie as {{stage: name, ...}}"
                )

    def refuse_different_starts(self, group: Sequence[Location]) -> None:
        """Refuses locations of one tie that start with different values: one would be overwritten.

        Different values are allowed if both locations surely hold the parameter, as each rank may
        use its own seed. They are also allowed if the overwritten values are zeros.

        Raises:
            PlanError: If they differ. It names two locations.
        """
        first, *others = group
        for location in others:
            start, other = self._starts.get(first), self._starts.get(location)
            are_certain = first in self._certain and location in self._certain
            if start is None or other is None or start == other or are_certain or is_zero(other[1]):
                continue
            tie = self._tie_of.get(location) or self._tie_of.get(first) or "of one rank"
            raise PlanError(different_starts(tie, first, location))
