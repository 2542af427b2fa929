"""Who holds which pages of prompts: keys, events of pages, the router's index. Needs numpy only."""
