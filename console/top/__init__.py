"""`baton top`: shows a router and its workers, live.

It reads the metrics of all processes. The router comes first, since its `/discovery` has the
workers' addresses. Rates and percentiles are computed from the difference of two scrapes, so
servers keep no history.

`scrape` reads, `view` turns two scrapes into figures, `screen` draws them.
"""
