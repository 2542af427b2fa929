"""Where others reach into the engine, without a patch."""
