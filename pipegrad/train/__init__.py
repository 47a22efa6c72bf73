"""The command `pipegrad train`: `config` reads a file, `job` applies it to ranks, `loop` trains."""
