"""The agreed model: the parameters of all ranks, and their ties.

`ties` finds tied parameters. `describe` makes the description of one rank's stages, and the
`manifest` from the descriptions of all ranks, which is equal on all of them. `suspects` recognises
undeclared ties by the initial values.
"""
