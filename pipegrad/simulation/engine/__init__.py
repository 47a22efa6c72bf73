"""The engine of a simulation: events, messages, NICs, comm streams and memory."""
