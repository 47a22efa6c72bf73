"""A stage's parameters by name, without a walk down the modules for each of them."""

from __future__ import annotations

from torch import nn


class ModuleTree:
    """Looks parameters up in a module by their full names.

    Which module has a parameter is found once. `check` finds out, by one look at each module, if
    another module has come in its place; then all is found anew.

    Args:
        root: What names begin in.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._children: dict[tuple[int, str], tuple[nn.Module, nn.Module]] = {}

    def check(self) -> None:
        """Forgets what was found if a module was replaced: call it before a series of look-ups."""
        for (_, name), (parent, child) in self._children.items():
            if parent._modules.get(name) is not child:
                self._owners, self._children = {}, {}
                return

    def parameter(self, full: str) -> nn.Parameter:
        """Returns the parameter that has this name now.

        Raises:
            AttributeError: If there is none.
        """
        if full not in self._owners:
            self._owners[full] = self._find(full)
        owner, name = self._owners[full]
        found = owner._parameters.get(name)
        return self.walk(full) if found is None else found

    def walk(self, full: str) -> nn.Parameter:
        """Returns the parameter that has this name now, at the cost of a walk, without `check`."""
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
