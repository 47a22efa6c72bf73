"""What does a schedule become?

`lower` turns a schedule into a `program`: all items of all ranks, with their transfers and the
launches of collectives. `verify` proves it: `simulate` does what a rank does, without tensors, and
`waits` finds where ranks wait for each other, under rendezvous: a send ends only when its receive
is posted.
"""
