"""Text becomes tokens: once, in pieces, by any number of processes, kept in the cache."""
