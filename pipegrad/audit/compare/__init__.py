"""What one process computes, and what a difference from it says. It sends nothing."""
