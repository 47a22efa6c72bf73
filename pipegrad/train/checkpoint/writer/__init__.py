"""How is a checkpoint written while the training goes on?

`saver` writes, in a thread with a process group of its own. `staging` copies what it writes.
`space` looks at the disk, and `kept` counts how many checkpoints will be there.
"""
