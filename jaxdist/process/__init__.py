"""The contract of a process with its surroundings: exit codes, the signals that stop it, its share of GPU memory."""
