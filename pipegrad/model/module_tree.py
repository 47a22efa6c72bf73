"""A stage's parameters by name, without a walk through the modules for each parameter."""

from __future__ import annotations

from torch import nn


class ModuleTree:
    """Finds parameters of a module by their full names.

    The module that has a parameter is looked up once, and remembered. `check` drops everything that
    is remembered if a module was replaced. It looks at each module once.

    Args:
        root: The module in which all names begin.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._children: dict[tuple[int, str], tuple[nn.Module, nn.Module]] = {}

    def check(self) -> bool:
        """Drops all remembered modules if one was replaced; returns whether none was.

        Call it before a series of look-ups.
        """
        for (_, name), (parent, child) in self._children.items():
            if parent._modules.get(name) is not child:
                self._owners, self._children = {}, {}
                return False
        return True

    def owner(self, full: str) -> tuple[dict[str, nn.Parameter | None], str]:
        """Returns the table of parameters that has this one, and its name there."""
        if full not in self._owners:
            self._owners[full] = self._find(full)
        owner, name = self._owners[full]
        return owner._parameters, name

    def parameter(self, full: str) -> nn.Parameter:
        """Returns the parameter that has this name now.

        Raises:
            AttributeError: If no parameter has it.
        """
        # Only the module is remembered, not the parameter: FSDP2 exchanges the parameter objects
        # of a module in each step.
        if full not in self._owners:
            self._owners[full] = self._find(full)
        owner, name = self._owners[full]
        parameter = owner._parameters.get(name)
        return self.walk(full) if parameter is None else parameter

    def walk(self, full: str) -> nn.Parameter:
        """Returns the parameter that has this name now. Needs no `check`, but is slower."""
        return self._root.get_parameter(full)

    def _find(self, full: str) -> tuple[nn.Module, str]:
        """Returns the module that has a parameter, and its name there."""
        *path, name = full.split(".")
        owner = self._root
        for step in path:
            child = owner.get_submodule(step)
            self._children[id(owner), step] = owner, child
            owner = child
        return owner, name
