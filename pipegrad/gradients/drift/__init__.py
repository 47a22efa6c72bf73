"""Are the copies of each parameter still equal, and which one is wrong?

Read `drift` first: it says when copies are compared, and what follows.
"""
