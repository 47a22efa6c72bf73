"""The plan of a rank: its reductions, and their order.

Pure: nothing here communicates. `routes` makes the route of each parameter from the results of the
handlers. `check` refuses wrong routes. `buckets` groups parameters of the same route. `plan` orders
the collectives, in the same way on all ranks, and finds the dimensions along which replicas train
alone.
"""
