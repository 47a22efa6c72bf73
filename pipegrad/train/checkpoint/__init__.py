"""How is a training saved, and continued in another cut?

`training_state` says what a rank writes and reads, `packed` has what is no tensor of the model, and
`shards` the pieces of whole tensors. `saving` writes beside the steps. `storage` knows the files,
verifies them and reads them. `resume` continues a run, and `uncut` makes a model of a checkpoint.
"""
