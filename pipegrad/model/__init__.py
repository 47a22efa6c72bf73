"""What do all ranks hold, and what is tied?

`ties` finds what is tied. `describe` makes the description of one rank's stages, and the `manifest`
from the descriptions of all ranks; it is the same on all of them. `suspects` recognises undeclared
ties by the initial values.
"""
