"""The orders that come with pipegrad: a plug-in each."""
