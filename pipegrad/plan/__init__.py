"""Who reduces what, and when?

Pure: nothing here communicates. `build_routes` asks the handlers for the route of each parameter,
`check_routes` and `check_replicas` refuse what cannot be right, `buckets` groups parameters of one
route, and `plan` orders the collectives alike on all ranks.
"""
