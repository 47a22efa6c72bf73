"""How does a model's own code run on each stage?"""
