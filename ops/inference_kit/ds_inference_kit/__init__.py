"""What a transformer computes at inference, as a list of instructions, and what executes it.

`program` has the instructions, `step` the rows of one step and the KV cache, `weights` the
quantised formats and `reference` the interpreter in plain torch, which defines what each
instruction means.
"""
