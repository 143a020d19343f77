"""A third party's loader: micro-batches of at most so many tokens, weighted so that each token
counts the same.
"""


def ds_config():
    from pydantic import Field

    from ds_core.config import Section

    class TokenBudget(Section):
        tokens: int = Field(gt=0, description="Tokens per micro-batch and rank, padding included.")

    return TokenBudget


def ds_loader(ctx, request):
    from token_budget.loader import TokenBudgetLoader

    return TokenBudgetLoader(ctx, request, ctx.config.section("token_budget").tokens)
