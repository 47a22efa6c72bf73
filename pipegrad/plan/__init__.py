"""Who reduces what, and when?

Pure: nothing here communicates. `routes` makes the route of each parameter from the results of the
handlers. `check` refuses wrong routes. `independent` has the dimensions along which replicas train
alone. `buckets` groups parameters of the same route. `plan` orders the collectives, in the same way
on all ranks.
"""
