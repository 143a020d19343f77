"""What a generator can answer at all, checked when a request comes: each that waits can end."""

from __future__ import annotations

from dataclasses import dataclass

from ds_inference_kit.step import BLOCK

from ds_core.errors import UsageError
from ds_inference.generate.requests import SamplingParams
from ds_inference.generate.scheduler import most_blocks


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one generator."""

    # Tokens are below it; None: whatever the program has.
    vocab: int | None
    # The largest length of a sequence.
    max_positions: int
    # The most sequences that decode at the same time.
    max_sequences: int
    # The number of blocks in the cache.
    blocks: int
    # What an error names as the key that limits the length of a sequence.
    most_key: str

    def new_tokens(self, prompt: list[int], params: SamplingParams, *, decodes: bool) -> int:
        """How many tokens may be added to `prompt`.

        decodes: whether there is a tokenizer.

        UsageError if it cannot be answered as the parameters say.
        """
        have = len(prompt)
        rows = params.rows
        if not prompt:
            raise UsageError(
                "a prompt needs at least one token (models begin with their bos token)"
            )
        if min(prompt) < 0 or (self.vocab is not None and max(prompt) >= self.vocab):
            raise UsageError(
                f"tokens of a prompt must be between 0 and {self.vocab} (the vocabulary), not "
                "included"
            )
        if rows > self.max_sequences:
            raise UsageError(
                f"{rows} beams or sequences for one prompt, but max_sequences={self.max_sequences}"
            )
        if params.stop_strings and not decodes:
            raise UsageError("stop_strings need a tokenizer: give one, or use stop_token_ids")
        # Sequences of one request share the whole blocks of the prompt; each has its own copy of
        # what follows.
        shared = have // BLOCK
        # blocks of one sequence, the prompt's whole ones included
        each = shared + (self.blocks - shared) // rows
        # The last token is chosen, and never written to the cache: hence one token more than blocks
        # have room for.
        fits = min(self.max_positions - have, each * BLOCK + 1 - have)
        new = fits if params.max_new_tokens is None else params.max_new_tokens
        if have + new > self.max_positions or new < 1:
            raise UsageError(
                f"a prompt of {have} tokens and max_new_tokens={params.max_new_tokens} are more "
                "than "
                f"{self.max_positions} positions (the model's, or {self.most_key}): shorten one"
            )
        # Accepting only what fits into the empty cache is what makes the scheduler end: see its
        # module.
        if most_blocks(have, new, rows) > self.blocks:
            raise UsageError(
                f"a prompt of {have} tokens and max_new_tokens={params.max_new_tokens} for {rows} "
                "sequences need "
                f"{most_blocks(have, new, rows) * BLOCK} tokens of cache, but it has "
                f"{self.blocks * BLOCK}: "
                "raise cache_tokens (max_out_tokens of init_inference) or shorten one of them"
            )
        return new
