"""The pictures of the documentation, drawn from data. `scripts/docs` writes them."""
