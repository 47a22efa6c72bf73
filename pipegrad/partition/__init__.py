"""Which layers are on which stage?"""
