"""Chaos: real processes under load and faults, and the proof that no answer was wrong.

`plan` draws a run from a seed, `arena` runs the processes, `clients` ask and keep histories,
`faults` does the damage, `checker` judges the histories and `quiet` what is left behind, and
`harness` puts them together: `python -m chaos --runs 500 --seed 1`.
"""
