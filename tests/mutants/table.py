"""Every mutant, from the tables by room."""

from tests.mutants import calib, registry, runtime

MUTANTS = [*runtime.MUTANTS, *registry.MUTANTS, *calib.MUTANTS]
