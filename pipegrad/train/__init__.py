"""What does `pipegrad train` do? `config` is read, `job` makes sense of it, `trainer` runs it."""
