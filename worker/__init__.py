"""A worker process: engine, KV pool and transfer thread behind one Work stream."""
