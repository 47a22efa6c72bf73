"""What happens in a step?

Read `sync` first: it has the verbs and their contracts. `state` has the table of states and verbs.
`step` has the code of each verb. `negotiate` and `set_up` make the parts. `parameter` is the
gradient of one parameter. `replicas` and `drift` keep copies equal, `norm` clips, and `non_finite`
names gradients that are not finite.
"""
