"""The checks of `baton doctor`.

`host` checks this machine, `path` the transport on it, `cluster` the processes behind a router,
`model` a model's folder.
Each check yields findings; `console.commands.doctor` shows them.
"""
