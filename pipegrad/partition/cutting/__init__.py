"""How does a model become stages, and how does its own code run on each of them?"""
