"""How is a training saved, and gone on with in another cut?

`checkpoint` saves and loads, `layout` says which rank writes what, `chunks` are the pieces, and
`checksums` verifies each before the first step.
"""
