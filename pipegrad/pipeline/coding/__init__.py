"""How do values cross a slow hop in fewer bytes?

`choice` is which codec each hop has, as a user gives it. `coding` makes messages with one of them,
and keeps the errors of gradients.
"""
