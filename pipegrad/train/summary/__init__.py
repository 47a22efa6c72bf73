"""What the ranks of a job will do, as data and as text."""
