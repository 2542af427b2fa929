"""`baton bench`: open-loop load on a gRPC or OpenAI endpoint, and what its clients saw.

Life of a run:

1. `workload` plans every request before anything is sent: when it is due, how long its prompt is,
   how many tokens it asks for. The same seed plans the same requests.
2. `fleet` deals them out to sender processes, which write every request out in full and warm up.
3. At one instant all begin. A request is sent when it is due, whatever became of those before; a
   message that comes back is stamped and kept as it is.
4. When the last has ended, senders read the messages that they kept, and send back one `Outcome`
   a request with how late they were themselves.
5. `summary` takes percentiles, `goodput` repeats all that at other rates, `report` draws it.

What is a figure of the client and not of the server is reported beside it, and where it is too
large the result says of itself that it is not valid.
"""
