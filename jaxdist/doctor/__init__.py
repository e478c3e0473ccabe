"""Check machines, network and folders before a run, and find stragglers and lost processes in one."""
