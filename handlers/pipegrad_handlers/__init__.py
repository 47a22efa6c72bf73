"""Gradient handlers that come with pipegrad: one handler a file, public names only."""
