"""The gradient layer: discover, agree, plan once; launch and finish each step."""
