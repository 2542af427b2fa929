"""`baton bench`: puts open-loop load on a gRPC or OpenAI endpoint and measures it as a client.

Life of a run:

1. `workload` plans every request before anything is sent: its due time, its prompt's length, its
   number of output tokens. The same seed plans the same requests.
2. `fleet` deals the requests out to sender processes. They write every request in full and warm up.
3. All senders begin at one instant. Each request is sent when it is due; a slow answer delays no
   later request. Answers are stamped and kept unread.
4. When the last answer has ended, each sender reads its answers. It sends back one `Outcome` a
   request, and how late it was itself.
5. `summary` takes percentiles, `goodput` repeats the run at other rates, `report` draws it.

Delays of the client itself are reported beside the figures. If they are too large, the result says
that it is not valid.
"""
