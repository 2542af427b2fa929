"""The fast door: the gRPC API over HTTP/2 that this process speaks itself."""
