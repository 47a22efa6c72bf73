"""What runs where?

`scheduler` is the page to read first. `executor` runs a program item by item, `compute` the
forwards and backwards, `transfers` what goes from rank to rank, and `split_backward` the backward
in two parts. `stage` is what users give, `partition` cuts a model into stages.
"""
