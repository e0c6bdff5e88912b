"""Tests of placements and rules: by arithmetic on all ranks side by side in one process."""
