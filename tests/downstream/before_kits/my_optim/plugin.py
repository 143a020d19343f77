from ds_core.entries import OptimizerEntry, SchedulerEntry


def ds_optimizers():
    return {"MySign": OptimizerEntry("my_optim.sign:MySign", params="my_optim.params:MySignParams", grain="element")}


def ds_schedulers():
    return {"MyHalving": SchedulerEntry("my_optim.sign:halving")}
