"""What does a schedule become?

`lower` makes a `program` of a schedule: all items of all ranks, transfers included. `simulate`
plays it under rendezvous, and `verify` proves that it ends.
"""
