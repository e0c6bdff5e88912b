"""Imports what compiling a model imports, in the process that ranks are forked from (`ranks`)."""

import autopar
from tests.models.zoo import build
from tests.warm import import_what_it_imports


def compile_once() -> None:
    model, make_batch = build("mlp")
    autopar.compile(model, 1, example_inputs=make_batch(0), profile_limit_s=0).close()


import_what_it_imports(compile_once)
