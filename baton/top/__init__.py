"""`baton top`: a router and its workers, live.

Everything comes from the metrics that the processes serve anyway. The router is asked first: its
`/discovery` says where the workers' are. Rates and percentiles are of what changed between two
scrapes, so nothing has to be kept by the servers.

`scrape` reads, `view` turns two scrapes into figures, `screen` draws them.
"""
