"""Local worker processes of one process or notebook, one a device, where ``torchrun`` starts none.

`group` is the parent's side and `main` the worker's; `transport` carries their messages.
"""
