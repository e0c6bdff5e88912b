"""Throughput of training steps: what each library's callback logs every so many steps.

In: a `Hosted` model after each step. Out: MFU, tokens or samples a second, and peak memory.
"""

from __future__ import annotations

from autopar.base.errors import InputError
from autopar.cost_models.hardware import is_count
from autopar.integrations.hosted import Hosted, Totals


class Throughput:
    """Figures of the training steps since the last ones, every ``every`` steps.

    The time is that of the steps, without loading data and without evaluation; the first step,
    which compiles, does not count. Raises InputError unless ``every`` is a whole number of steps.
    """

    def __init__(self, every: int) -> None:
        if not is_count(every):
            raise InputError(f"every is {every!r}; it must be a whole number of steps, at least 1")
        self.every = every
        self._before = Totals()

    def after_step(self, hosted: Hosted | None) -> dict[str, float]:
        """The figures by name; empty where none are due.

        * ``mfu``: the model's floating-point operations as a fraction of all devices' peak.
        * ``tokens_per_s``, or ``samples_per_s`` for batches without token ids.
        * ``peak_memory_gib``: the largest growth of a device's memory since before training, GiB.
        """
        if hosted is None or hosted.compiled is None:
            return {}
        now, before = hosted.totals, self._before
        if now.num_steps < before.num_steps:  # another training has begun
            before = Totals()
        time_s = now.time_s - before.time_s
        if now.num_steps % self.every or time_s <= 0:
            return {}
        self._before = now
        predicted = hosted.compiled.plan.prediction
        of_tokens = bool(predicted.tokens_per_s) and now.num_tokens > before.num_tokens
        if of_tokens:
            name, expected = "tokens_per_s", predicted.tokens_per_s or 0.0
            rate = (now.num_tokens - before.num_tokens) / time_s
        else:
            name, expected = "samples_per_s", predicted.samples_per_s
            rate = (now.num_samples - before.num_samples) / time_s
        found = {name: rate}
        if expected and predicted.model_flops_utilisation:
            found["mfu"] = predicted.model_flops_utilisation * rate / expected
        found["peak_memory_gib"] = max(hosted.compiled.memory_growth_bytes()) / 2**30
        return found
