"""What do all ranks hold, and what is tied?

`describe` makes the description of one rank's stages. `merge` makes the `manifest` from the
descriptions of all ranks; it is the same on all of them. `claims` finds the parameters of a
declared tie. `suspects` recognises undeclared ties by the initial values.
"""
