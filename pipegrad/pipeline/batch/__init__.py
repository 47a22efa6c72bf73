"""What do the stages of this rank get?

`microbatch` makes microbatches of a batch, or takes ready ones, and keeps the caller's graphs
apart. `trees` says what is cut of a value, and `passed` whether ranks are given one batch.
"""
