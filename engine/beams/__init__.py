"""Beam search: sequences of one request that are chosen together, step by step.

    params      what a request asks for
    plan        a search in one step, which chooses on the device (`engine.sampling.beams`)
    chooser     the protocol of whoever chooses how a request's sequences go on
    search      the search of transformers, as such a chooser

`engine.schedule.choosing` moves the sequences and their pages as a chooser says. Log probabilities
are the sampler's: each row is planned with as many top log probabilities as its chooser reads.
"""
