"""Work that may crash, hang or fill memory: it runs in processes beside the router.

A `ForkServer` keeps one process with everything ready, such as a model's tokenizer. It forks a
process for each task, bounded in CPU time, memory and time. So nothing that a request
brings can end the router, and nothing of it stays behind for the next one.
"""
