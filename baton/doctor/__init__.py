"""What `baton doctor` looks at: `host` this machine, `path` the transport on it, `cluster` what
runs behind a router. Each check yields findings; `baton.commands.doctor` shows them."""
