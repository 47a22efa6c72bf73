"""From a schedule to a Program.

`lower` turns a schedule into a `program`: all items of all ranks, with their transfers. `verify`
proves it by a `run` without tensors, under rendezvous: a send ends only when its receive is posted.
"""
