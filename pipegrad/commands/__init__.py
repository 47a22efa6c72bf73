"""The commands of `pipegrad`, a file each. Each imports torch only when it runs."""
