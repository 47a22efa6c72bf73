"""How does the process of a rank begin, and how does it end?

`process` joins the ranks, and `start` keeps restarts apart. `signals` takes signals, and
`last_words` is what a rank says when the job fails.
"""
