from pipegrad.testing import HandlerContract


class TestBf16Mean(HandlerContract):
    handler = "bf16-mean"
    beside = ("pipeline-shared",)
    relative_error = 2**-7  # bfloat16 rounds by 2**-8: what is sent, and then the sum
