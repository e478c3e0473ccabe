"""`jaxdist completion SHELL`: a script that completes commands, options and values in bash, zsh or fish.

`table` asks every command what its --help lists, `scripts` writes that into the template of a shell. The script holds
everything: a TAB starts no Python.
"""
