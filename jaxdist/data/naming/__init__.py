"""What `data.path` names: files, folders, patterns, lists, and what is refused by name."""
