"""How do values travel between ranks?

`transfers` posts receives and sends, and has the note on shapes. `messages` is what crosses an
edge, `buffers` is where it arrives, and `edges` are the communicators.
"""
