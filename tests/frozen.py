"""Imported last by the warm process: what it has imported is never garbage, so its forks need not look through it."""

import gc

gc.collect()
gc.freeze()
