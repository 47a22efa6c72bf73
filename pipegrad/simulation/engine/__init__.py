"""What happens next in a simulation: ranks, messages, NICs, comm streams and bytes."""
