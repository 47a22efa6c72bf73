"""What happens in a step?

`sync` is the page to read first. `negotiate` is its set-up, `parameter` one parameter with its
gradient, `replicas` and `drift` keep copies equal and notice if they are not, and `norm` clips.
"""
