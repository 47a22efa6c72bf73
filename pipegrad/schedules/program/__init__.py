"""What does a schedule become?

`lower` turns a schedule into a `program`: all items of all ranks, with their transfers and the
launches of collectives. `simulate` runs all ranks under rendezvous, without tensors: a send ends
only when its receive is posted. `verify` uses it to prove that the program ends.
"""
