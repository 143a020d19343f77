import torch
from torch.nn.utils.rnn import pad_sequence


class TokenBudgetLoader:
    def __init__(self, ctx, request, tokens):
        self.ctx = ctx
        self.request = request
        self.tokens = tokens
        # done: micro-batches of all ranks in this epoch
        self.epoch = self.done = self.samples_seen = 0

    def plan(self):
        """The micro-batches of all ranks in this epoch; what does not fill a whole step is left
        out.
        """
        generator = torch.Generator().manual_seed(self.request.seed + self.epoch)
        batches = [[]]
        longest = 0
        for i in torch.randperm(len(self.request.dataset), generator=generator).tolist():
            longest = max(longest, len(self.request.dataset[i]))
            if batches[-1] and longest * (len(batches[-1]) + 1) > self.tokens:
                batches.append([])
                longest = len(self.request.dataset[i])
            batches[-1].append(i)
        step = self.request.replicas * self.ctx.batch.gas
        return batches[: len(batches) // step * step], step

    def __iter__(self):
        data = self.request.dataset
        (batches, step) = self.plan()
        while self.done < len(batches):
            first = self.done // step * step
            total = sum(len(data[i]) for batch in batches[first : first + step] for i in batch)
            mine = [data[i] for i in batches[self.done + self.request.index]]
            self.samples_seen += sum(
                map(len, batches[self.done : self.done + self.request.replicas])
            )
            self.done += self.request.replicas
            yield pad_sequence(mine, batch_first=True), sum(map(len, mine)) * step / total
        self.epoch = self.epoch + 1
        self.done = 0

    def state_dict(self):
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.done = state["done"] // self.request.replicas * self.request.replicas
