"""How long does a step take, where does its time go, what would be faster? Without torch."""
