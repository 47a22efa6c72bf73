"""How is a backward split?

`graph` computes the gradients of the inputs, `products` are the gradients of weights that wait,
and `weights` computes them later.
"""
