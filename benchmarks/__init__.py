"""What lkv costs beside its peers and limits: ``lkv bench``, or ``python -m benchmarks`` from the root of a checkout.

Contenders of one table run in one process, in random order, and are compared round by round: ratios hold from run to
run and machine to machine, nanoseconds do not. An installed lkv has this folder as ``lkv.bench``.
"""
