"""A process of a job dies, hangs or raises: all others stop in time, with an error that names it.

`watch` is what a run holds; `watchers` are its threads, which speak in `lines`; `here` is this
process's part, `whereabouts` what others can read of it, `neighbours` reads that of dead ones;
`life` tells of one that does not speak; `step_limit` says when a step has hung; `judge` finds the
culprit.
"""
