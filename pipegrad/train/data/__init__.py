"""What is trained on? `corpus` has batches of text, `dataset` those of a user's function.

Files of text are read once a machine, by the library `datasets`, or by each rank as a stream.
`feed` fetches batches a step ahead, so that all ranks know before a step whether each has one.
"""

from pipegrad.train.data.corpus import Corpus, mixed, read_corpus

__all__ = ["Corpus", "mixed", "read_corpus"]
