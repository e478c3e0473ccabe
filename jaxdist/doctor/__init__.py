"""What is wrong with machines, network and folders before a run, and who is slow or silent in one."""
