"""What packages of compiled kernels share: references, building, marshalling and comparisons.

Nothing is imported here. `references` defines the optimizer steps, sums and quantisation in plain
torch; `build` compiles extensions on first use; `cache` keeps the finished libraries; `marshal`
turns calls into what compiled code takes; `comparisons` checks a provider against its reference.
"""
