"""What a run is doing, as it tells the watchdog and its heartbeats."""

STARTING, READING, COMPILING = "starting", "reading data", "compiling"
STEPPING, VALIDATING, SAVING = "stepping", "validating", "saving"
WAITING, ENDING = "waiting for data", "ending"
AWAITING = "waiting for process 0, which reads the data first"
IDLE = "waiting for other processes, which measure without this one"

ORDER = (STARTING, AWAITING, READING, COMPILING, STEPPING, VALIDATING, SAVING, WAITING, ENDING)
"""In the order of a step: data are awaited for the next one."""
