"""Model folders as transformers reads them: which tokenizer, which special tokens."""
