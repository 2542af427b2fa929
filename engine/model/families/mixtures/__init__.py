"""Lines of models whose feed-forwards are experts, one file for each."""
