"""What HTTP needs, whichever API it carries.

`connections` are counted and bounded. `origins` says which web pages may call. `edge` leads one
request from its headers to its answer: it reads `bodies` within their bounds and words errors by
`statuses`.
"""
