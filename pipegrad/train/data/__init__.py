"""What is trained on? `corpus` draws batches of text, `dataset` has those of a user's function.

Text is read and cut into tokens once a machine (`tokens`, `tokenizer`). `feed` fetches batches a
step ahead, so that all ranks know before a step whether each of them has one.
"""

from pipegrad.train.data.corpus import Corpus, mixed, read_corpus

__all__ = ["Corpus", "mixed", "read_corpus"]
