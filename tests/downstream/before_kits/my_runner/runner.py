import torch

from ds_core.runner import Runner, Sequential, call_with_batch, loss_of


class PulledFirst(Runner):
    """Takes all micro-batches before it runs the first."""

    def train(self, engine, batches, count):
        losses = []
        for index, batch in enumerate([next(batches) for _ in range(count)]):
            loss = loss_of(call_with_batch(engine, batch))
            engine.backward_micro(loss, last=index == count - 1)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def evaluate(self, engine, batches, count, *, return_logits, compute_loss=True):
        return Sequential().evaluate(engine, batches, count, return_logits=return_logits, compute_loss=compute_loss)
