"""Where do the values of a stage come from, and where are they saved?"""
