"""Fault handling: when a process of a job dies, hangs or raises, all others stop with its name.

`rendezvous` brings the ranks together, `watch` is what a runner holds, and `watchers` are its
threads, which exchange messages as `json_lines`. `own_rank` is the state of this process,
`progress` the page in which it publishes what it does, `host_peers` reads the pages of the other
processes on the host, also of dead ones. `liveness` tells whether a process is stopped or idle,
`step_limit` when a step has taken too long, and `judge` which rank is at fault.
"""
