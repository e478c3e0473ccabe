"""What the lectures tell, run: small programs that show every number they claim, read from the devices.

They run on CPU devices, also where there are GPUs: the same numbers on every machine, and products in full float32.
"""
