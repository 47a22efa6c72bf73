"""How does a name become an object?

`handler` is the contract of a gradient handler, `registry` finds plug-ins by their entry points,
and `options` checks what is passed to them before anything is called.
"""
