"""How do values travel between ranks?

`transfers` posts receives and sends, and has the notes on memory, shapes and headers. `ends` is
what both ranks of a channel know, `messages` what values look like, `edges` the communicators.
"""
