"""Who may speak with a server process: certificates, TLS, peers that were refused."""
