"""Plug-ins: contracts, and the way from a name to an object.

`handler` and `codec` are the contracts. `registry` finds plug-ins by their entry points, and checks
their options before they are called. `written` makes a text of any value, which ranks compare.
"""
