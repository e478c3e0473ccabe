"""Look at data before a training: files, documents, lengths, duplicates, samples, and what would be refused."""
