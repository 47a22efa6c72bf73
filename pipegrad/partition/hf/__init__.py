"""What do models of transformers take, and where do the values of stages come from and go?"""
