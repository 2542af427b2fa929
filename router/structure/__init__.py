"""The form of an output: schemas, regular expressions and tools become one grammar."""
