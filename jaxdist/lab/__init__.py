"""The lecture's claims as small programs, which read every number that they show from the devices.

They run on CPU devices, even where there are GPUs: the numbers are the same on every machine, and matmuls are in full
float32.
"""
