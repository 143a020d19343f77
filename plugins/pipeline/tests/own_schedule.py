"""A schedule of one's own."""

from collections.abc import Iterator

from ds_pipeline.schedules import schedule as s


class GPipe(s.PipeSchedule):
    """All forwards, then all backwards."""

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        for m in range(self.micro_batches):
            step: list[s.PipeInstruction] = [] if self.is_first_stage else [s.RecvActivation(m)]
            if self.is_first_stage or self.is_last_stage:
                step.append(s.LoadMicroBatch(m))
            step.append(s.ForwardPass(m))
            yield step if self.is_last_stage else [*step, s.SendActivation(m)]
        for m in range(self.micro_batches):
            step = [] if self.is_last_stage else [s.RecvGrad(m)]
            step.append(s.BackwardPass(m))
            yield step if self.is_first_stage else [*step, s.SendGrad(m)]
        yield [s.ReduceTiedGrads(), s.ReduceGrads(), s.OptimizerStep()]


class Forgetful(GPipe):
    """Forgets to go backward."""

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        forwards = [
            step
            for step in super().steps()
            if not any(w.name.endswith(("BackwardPass", "Grad")) for w in step)
        ]
        yield from forwards
