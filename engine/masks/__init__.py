"""Token masks: the tokens that a sequence may draw next.

A `TokenMatcher` follows one sequence. It gets the tokens drawn, and fills one row of bits, a bit
for each token of the vocabulary, before the next draw. `Matchers` makes them from the options of a
request, on a thread of its own.
"""
