"""How does a name become an object?

`handler` is the contract of a gradient handler. `registry` finds plug-ins by their entry points.
`options` checks the options of a plug-in before it is called. `written` makes a text of any value,
which ranks compare.
"""
