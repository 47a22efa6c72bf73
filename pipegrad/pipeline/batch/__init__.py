"""What do the stages of this rank get?

`microbatch` makes microbatches of a batch, or takes ready ones. `trees` says what is cut of a
value. `outer_graphs` keeps the caller's graphs apart, and `repeated` warns of tables.
"""
