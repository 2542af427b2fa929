"""What every server process shares: settings, event loop, gRPC services, release, GPU slots."""
