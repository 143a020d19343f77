"""ZenFlow: important columns of weights are updated on the device in every step, others on the host
now and then.
"""
